//! Pages of an engine's cache in a folder: every layout, several processes, damage.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use codec_core::{FitOptions, LayerRows, Place, PlaneBuf, Profile, Steps};
use half::{bf16, f16};
use kv_store::{Error, KvStore, Options, PageLayout, PageModel, Pages, Put};

/// Workers, layers, blocks, tokens, heads, components.
const SIZES: [(char, usize); 7] = [('W', 2), ('L', 3), ('B', 2), ('T', 5), ('H', 2), ('2', 2), ('D', 8)];

fn layout(order: &str) -> PageLayout {
    let size = |letter| SIZES.iter().find(|(of, _)| *of == letter).unwrap().1;
    PageLayout::new(order, &order.chars().map(size).collect::<Vec<_>>()).unwrap()
}

/// Values that say where they belong, in the order of the dimensions.
fn page(order: &str, salt: usize) -> Vec<bf16> {
    let n = layout(order).elements();
    let element = |mut i: usize| {
        let mut value = salt as f32;
        for letter in order.chars().rev() {
            let (place, (_, size)) = SIZES.iter().enumerate().find(|(_, (of, _))| *of == letter).unwrap();
            value += (i % size * (place + 3)) as f32;
            i /= size;
        }
        bf16::from_f32(value.sin() * 3.0)
    };
    (0..n).map(element).collect()
}

fn open(folder: &Path) -> Arc<KvStore> {
    Arc::new(KvStore::open(&folder.display().to_string(), Options::default()).unwrap())
}

fn pages(folder: &Path, name: &str, part: &str) -> Pages {
    Pages::new(open(folder), PageModel::new::<bf16>(name, part, &layout("2LTHD")), None).unwrap()
}

fn put(pages: &Pages, key: &[u8], order: &str, salt: usize) -> Put {
    pages.put(&pages.encode(key, &page(order, salt), &layout(order)).unwrap()).unwrap()
}

/// A page, if it is found and can be decoded.
fn get(pages: &Pages, key: &[u8], order: &str) -> Option<Vec<bf16>> {
    let mut out = vec![bf16::ZERO; layout(order).span()];
    let fetched = pages.fetch(key, 0).unwrap()?;
    pages.decode(&fetched, &mut out, &layout(order)).unwrap().then_some(out)
}

fn files(folder: &Path, kind: &str) -> Vec<PathBuf> {
    let spaces = fs::read_dir(folder).unwrap().map(|space| space.unwrap().path().join(kind));
    let entries = spaces.filter_map(|kind| fs::read_dir(kind).ok()).flatten();
    let mut found = vec![];
    for path in entries.map(|entry| entry.unwrap().path()) {
        match path.is_dir() {
            true => found.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path())),
            false => found.push(path),
        }
    }
    found
}

#[test]
fn pages_of_every_order_keep_every_bit() {
    let folder = tempfile::tempdir().unwrap();
    for order in ["WLBTH2D", "WLBHT2D", "BWLTH2D", "2WLBTHD", "2BTWLHD", "2BHTLWD", "WL2BTHD"] {
        let model = PageModel::new::<bf16>("model", order, &layout(order));
        let pages = Pages::new(open(folder.path()), model, None).unwrap();
        assert_eq!(put(&pages, b"key", order, 1), Put::Stored, "{order}");
        assert_eq!(get(&pages, b"key", order).unwrap(), page(order, 1), "{order}");
    }
    // Another order of the same page.
    let pages = pages(folder.path(), "model", "");
    put(&pages, b"key", "2LTHD", 2);
    assert_eq!(get(&pages, b"key", "LTH2D").unwrap(), page("LTH2D", 2));
    assert_eq!(get(&pages, b"key", "2TLHD").unwrap(), page("2TLHD", 2));
}

#[test]
fn every_bit_pattern_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let pages = pages(folder.path(), "model", "");
    put(&pages, b"first", "2LTHD", 0);
    let page: Vec<bf16> = (0..480_u16).map(|i| bf16::from_bits(i.wrapping_mul(0x9e37) ^ 0x7f80)).collect();
    pages.put(&pages.encode(b"any", &page, &layout("2LTHD")).unwrap()).unwrap();
    let found: Vec<u16> = get(&pages, b"any", "2LTHD").unwrap().iter().map(|x| x.to_bits()).collect();
    assert_eq!(found, page.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
}

#[test]
fn processes_share_the_profile_of_the_first_page() {
    let folder = tempfile::tempdir().unwrap();
    let writers: Vec<Pages> = (0..4).map(|_| pages(folder.path(), "model", "rank 0")).collect();
    assert!(!writers[0].contains(b"0").unwrap());
    std::thread::scope(|scope| {
        for (i, writer) in writers.iter().enumerate() {
            scope.spawn(move || put(writer, format!("{i}").as_bytes(), "2LTHD", i));
        }
    });
    assert_eq!(fs::read_dir(folder.path().join("profiles")).unwrap().count(), 1);
    let reader = pages(folder.path(), "model", "rank 0");
    for i in 0..4 {
        assert_eq!(get(&reader, format!("{i}").as_bytes(), "2LTHD").unwrap(), page("2LTHD", i));
        assert_eq!(put(&reader, format!("{i}").as_bytes(), "2LTHD", i), Put::Present);
    }
    for (name, part) in [("model", "rank 1"), ("model", ""), ("model2", "rank 0")] {
        let other = pages(folder.path(), name, part);
        assert!(!other.contains(b"0").unwrap() && get(&other, b"0", "2LTHD").is_none(), "{name} {part}");
    }
    reader.delete(b"0").unwrap();
    reader.delete(b"0").unwrap();
    assert!(!writers[0].contains(b"0").unwrap() && writers[0].contains(b"1").unwrap());
}

/// Flipped, cut, missing and swapped objects are never returned, and the page can be stored again.
#[test]
fn damaged_pages_are_missing_and_stored_again() {
    for damage in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let pages = pages(folder.path(), "model", "");
        put(&pages, b"a", "2LTHD", 1);
        let a = (files(folder.path(), "chunks")[0].clone(), files(folder.path(), "data")[0].clone());
        put(&pages, b"b", "2LTHD", 2);
        let is_b = |path: &PathBuf| *path != a.0 && *path != a.1;
        let b: Vec<_> =
            ["chunks", "data"].map(|kind| files(folder.path(), kind).into_iter().find(is_b).unwrap()).into();
        let mut bytes = fs::read(&a.1).unwrap();
        match damage {
            0 => *bytes.last_mut().unwrap() ^= 1,
            1 => bytes.truncate(100),
            2 => bytes = fs::read(&b[1]).unwrap(),
            3 => fs::remove_file(&a.1).unwrap(),
            4 => fs::write(&a.0, fs::read(&b[0]).unwrap()).unwrap(),
            _ => fs::write(&a.0, b"").unwrap(),
        }
        if damage < 3 {
            fs::write(&a.1, bytes).unwrap();
        }
        let found = get(&pages, b"a", "2LTHD");
        assert!(found.is_none(), "{damage}");
        assert_ne!(put(&pages, b"a", "2LTHD", 1), Put::Present, "{damage}");
        assert_eq!(get(&pages, b"a", "2LTHD").unwrap(), page("2LTHD", 1), "{damage}");
        assert_eq!(get(&pages, b"b", "2LTHD").unwrap(), page("2LTHD", 2), "{damage}");
    }
}

#[test]
fn a_damaged_profile_is_replaced_and_its_pages_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    put(&pages(folder.path(), "model", ""), b"a", "2LTHD", 1);
    let profile = fs::read_dir(folder.path().join("profiles")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&profile).unwrap();
    bytes[90] ^= 1;
    fs::write(&profile, bytes).unwrap();
    let pages = pages(folder.path(), "model", "");
    assert!(!pages.contains(b"a").unwrap());
    put(&pages, b"b", "2LTHD", 2);
    assert_eq!(get(&pages, b"b", "2LTHD").unwrap(), page("2LTHD", 2));
}

#[test]
fn levels_of_a_profile_are_stored_together() {
    let (folder, order) = (tempfile::tempdir().unwrap(), "2LTHD");
    let sample = page(order, 5);
    let layout = layout(order);
    let model = codec_core::ModelInfo { model_id: 1, layers: 3, heads: 2, head_dim: 8, keys_rotated: true };
    let plane = |side: usize, layer: usize| &sample[(side * 3 + layer) * 80..][..80];
    let rows: Vec<_> = (0..3).map(|l| LayerRows { keys: plane(0, l), values: plane(1, l) }).collect();
    let place = Place::nhd(2, 8);
    let fit = |_, _, _, rows: &[f32]| {
        PlaneBuf::fit(rows, 16, None, &FitOptions { steps: Steps::Deviations(0.1), ..FitOptions::default() })
    };
    let lossless = Profile::fit_lossless(model, codec_core::ElementType::Bf16, 5, &rows, &place).unwrap();
    let lossy = Profile::fit(model, 1, 5, &rows, &place, fit).unwrap();
    let profile = Profile::join([lossless, lossy]).unwrap();
    let of = PageModel::new::<bf16>("model", "", &layout);
    let pages = Pages::new(open(folder.path()), of.clone(), Some(profile.clone())).unwrap();
    put(&pages, b"a", order, 5);
    assert_eq!(get(&pages, b"a", order).unwrap(), sample);
    let (mut out, fetched) = (vec![bf16::ZERO; 480], pages.fetch(b"a", 1).unwrap().unwrap());
    assert!(pages.decode(&fetched, &mut out, &layout).unwrap() && out != sample);
    assert!(out.iter().zip(&sample).all(|(a, b)| (a.to_f32() - b.to_f32()).abs() < 0.3));
    assert!(matches!(pages.fetch(b"a", 2), Err(Error::Argument(_))));

    // Arguments that do not fit.
    let other = PageLayout::new("2LTHD", &[2, 3, 5, 2, 9]).unwrap();
    assert!(matches!(pages.encode(b"a", &[bf16::ZERO; 540], &other), Err(Error::Argument(_))));
    assert!(matches!(pages.encode(b"a", &[f16::ZERO; 480], &layout), Err(Error::Argument(_))));
    assert!(matches!(pages.encode(b"a", &[bf16::ZERO; 479], &layout), Err(Error::Codec(_))));
    assert!(pages.encode(b"a", &[bf16::NAN; 480], &layout).is_err());
    assert!(pages.decode(&fetched, &mut [bf16::ZERO; 481], &layout).is_err());
    let store = || open(folder.path());
    let halves = PageModel::new::<f16>("model", "", &layout);
    assert!(Pages::new(store(), halves, Some(profile.clone())).is_err());
    assert!(Pages::new(store(), PageModel::new::<bf16>("model", "", &other), Some(profile)).is_err());
    assert!(Pages::new(store(), PageModel::new::<f32>("model", "", &layout), None).is_err());
}
