//! Untrusted serialized maps and caches: an error or a value that serializes again, with allocations bounded
//! by the input's length.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use svd_core::*;

fuzz_target!(|input: &[u8]| {
    if let Ok(maps) = HeadMaps::from_bytes(input) {
        assert_eq!(maps.to_bytes(), input);
        let dims = [maps.keys().dim(), maps.values().dim()];
        go_on(&mut LowRankLayerCache::new(&[Arc::new(maps)], WINDOW).unwrap(), dims);
    }
    // A cache of one head whose maps have the id in the bytes.
    let maps = HeadMaps::new(Reduction::folded(4, 2).unwrap(), Reduction::folded(3, 3).unwrap());
    let mut named = input.to_vec();
    if let Some(id) = named.get_mut(44..52) {
        id.copy_from_slice(&maps.id().to_le_bytes());
    }
    if let Ok(mut cache) = LowRankLayerCache::<f32>::from_bytes(&named, &[Arc::new(maps)]) {
        assert_eq!(cache.to_bytes(), named);
        go_on(&mut cache, [4, 3]);
    }
});

const WINDOW: Window = Window { sinks: 1, recent: 1, batch: 1 };

/// Continues decoding with a cache of one head.
fn go_on(cache: &mut LowRankLayerCache<f32>, [dim, dim_v]: [usize; 2]) {
    let (row, mut out) = (vec![1.0; dim.max(dim_v)], vec![0.0; dim_v]);
    for _ in 0..3 {
        cache.append(Rows::from(&row[..dim]), Rows::from(&row[..dim_v])).unwrap();
        let workspace = &mut Workspace::default();
        let query = Rows::from(&row[..dim]);
        cache.attend_into(&Attention::scaled(0.5), query, workspace, &mut out).unwrap();
    }
    cache.truncate(cache.len() / 2);
    assert!(cache.size() >= cache.len() * size_of::<f32>());
}
