//! Every kernel of the caches, to be compiled by a test.

use kv_attend::owner::Side;
use kv_gpu::pq::CodeLayout;
use kv_gpu::{Element, Program};
use pq_core::PqShape;

use crate::cache::codes::prepare;
use crate::cache::million::prefix;
use crate::cache::row_store::{int8, residency};
use crate::cache::{eviction, int4, merge, paged, row_store, sq, zack};
use crate::{bases, hashed, rotate};

/// Every kernel of the caches for a compute capability, to be compiled without a device: for codes of all
/// layouts.
#[must_use]
pub fn programs(capability: (i32, i32)) -> Vec<Program> {
    let mut programs = vec![
        eviction::program(),
        paged::program(),
        row_store::program(),
        zack::program(64),
        zack::program(128),
    ];
    programs.extend([residency::program(true), residency::program(false)]);
    for element in [Element::F16, Element::Bf16] {
        programs.push(hashed::program(element));
        programs.extend([64, 128].map(|dim| rotate::program(element, dim)));
        programs.extend([64, 128].map(|dim| int8::program(element, dim)));
        if capability.0 >= 9 {
            programs.extend([64, 128].map(|dim| int8::program_sm90(element, dim)));
        }
        let heads = [(64, 3), (128, 1), (128, 4), (128, 16)];
        programs.extend(heads.map(|(dim, group)| merge::program(element, dim, group)));
        // N.B. With 256 components `prepare`, `restore` and `map_values` spill up to 576 bytes: a thread holds
        // a column of a map.
        programs.extend([64, 96, 128].map(|dim| sq::program(element, dim)));
        // N.B. With 16 queries of a head `attend` of int4 spills 8 bytes for sm_90.
        programs.extend(heads[..3].iter().map(|&(dim, group)| int4::program(element, dim, group)));
        programs.extend(heads.map(|(dim, group)| bases::program(element, dim, group)));
        programs.extend([64, 128].map(|dim| bases::program(element, dim, 0)));
        for (mean, norms) in [(true, false), (false, true), (true, true)] {
            programs.extend([64, 128].map(|dim| prepare::program(element, dim, mean, norms)));
        }
        let shapes = [(128, 64, 8), (128, 64, 6), (128, 32, 8), (128, 128, 4), (64, 16, 4), (64, 32, 8)];
        let shapes = shapes.into_iter().filter_map(|(dim, m, nbits)| PqShape::new(dim, m, nbits).ok());
        programs.extend(shapes.flat_map(|shape| {
            let layout = move |side: Side| CodeLayout::new(shape, side).ok();
            Side::ALL.into_iter().filter_map(move |side| Some(prefix::program(element, &layout(side)?, side)))
        }));
    }
    programs
}
