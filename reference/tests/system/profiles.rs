//! A damaged profile is rejected, and a failed write does not lose an existing one.

use std::path::Path;
use std::process::Command;

use kv_reference::compare::calibrated;
use kv_reference::method::Method;
use kv_reference::model::{Model, Rope};
use kv_reference::{Error, Profile};

/// A tiny random model and a profile for it.
fn setup() -> (Model, Profile) {
    let model =
        Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/fixtures/gqa")).unwrap();
    let rope = Rope::new(&model.config, 256);
    let tokens: Vec<u32> = (0..256_u32).map(|i| (i * i + 7 * i) % 96).collect();
    let methods = Method::parse_list("million:k=4x2:v=4x2,pqklt:k=4x2:v=4x2,zack,cachegen").unwrap();
    let profile = calibrated(&model, &rope, &tokens, &methods).unwrap();
    (model, profile)
}

#[test]
fn damaged_profiles_are_refused() {
    let (model, profile) = setup();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile");
    profile.save(&path, &model).unwrap();
    let good = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut state = 1_u64;
    let mut next = |end: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end
    };
    let mut refused = 0;
    for round in 0..2000 {
        let mut bytes = good.clone();
        // One or several bytes anywhere, or a bit of an entry, or two parts of the entries swapped.
        match round % 4 {
            0 => bytes[next(good.len())] = next(256) as u8,
            1 => (0..1 + next(4)).for_each(|_| bytes[next(data)] = next(256) as u8),
            2 => bytes[data + next(good.len() - data)] ^= 1 << next(8),
            _ => {
                let len = 1 + next(64);
                let [a, b] = [0, 1].map(|_| data + next(good.len() - data - len));
                bytes.copy_within(a..a + len, b);
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        match Profile::load(&path, &model) {
            Err(Error::File { what, .. }) => {
                refused += 1;
                if bytes[..data] == good[..data] {
                    assert!(what.contains("checksum"), "{what}");
                }
            }
            Err(Error::Profile(what)) => assert!(what.contains("was made for"), "{what}"),
            Err(other) => panic!("{other}"),
            Ok(loaded) => {
                loaded.save(&path, &model).unwrap();
                assert!(std::fs::read(&path).unwrap() == good, "round {round}: other entries were taken");
            }
        }
    }
    assert!(refused > 1500, "{refused}");
}

/// A file of at most 4 KiB may be written, as on a disk that is full.
#[cfg(unix)]
#[test]
fn a_good_profile_survives_a_write_that_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile");
    std::fs::write(&path, b"a good profile").unwrap();
    let script = "trap '' XFSZ; ulimit -f 4; exec \"$0\" calibrate \"$1\" --tokens 128 --methods zack";
    let kv = Command::new("bash").args(["-c", script, env!("CARGO_BIN_EXE_kv")]).arg(&path).output().unwrap();
    assert!(!kv.status.success());
    let stderr = String::from_utf8_lossy(&kv.stderr);
    assert!(stderr.contains("profile"), "{stderr}");
    assert_eq!(std::fs::read(&path).unwrap(), b"a good profile");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "a draft stays");
}
