//! A damaged profile is rejected, and a failed write does not lose an existing one.

use std::process::Command;

use kv_methods::{Error, Method, Profile, calibrated};
use kv_model::{Model, Rope};

use crate::support::kv::{copy, fixture};

/// A tiny random model and a profile for it.
fn setup() -> (Model, Profile) {
    let model = Model::load(&fixture("gqa")).unwrap();
    let rope = Rope::new(&model.config, 256);
    let tokens: Vec<u32> = (0..256_u32).map(|i| (i * i + 7 * i) % 96).collect();
    let methods = Method::parse_list("million:k=4x2:v=4x2,pqklt:k=4x2:v=4x2,zack,cachegen").unwrap();
    let profile = calibrated(&model, &rope, &tokens, &methods).unwrap();
    (model, profile)
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn damaged_profiles_are_refused() {
    let (model, profile) = setup();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile");
    profile.save(&path, &model).unwrap();
    let good = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut rng = fastrand::Rng::with_seed(1);
    let mut next = |end: usize| rng.usize(..end);
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
            Err(Error::Model(kv_model::Error::File { what, .. })) => {
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

/// Profiles and stores know a model by its hash: it stands for what keys and values depend on.
#[test]
fn the_hash_of_a_model_stands_for_its_keys_and_values() {
    let hash_of = |fixture: &str, change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let folder = copy(fixture);
        let path = folder.path().join("config.json");
        let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
        Model::load(folder.path()).unwrap().hash
    };
    let as_it_is = hash_of("gqa", &|_| ());
    assert_eq!(as_it_is, Model::load(&fixture("gqa")).unwrap().hash);
    let with = |key: &'static str, value: serde_json::Value| {
        hash_of("gqa", &move |config| drop(config.insert(key.to_owned(), value.clone())))
    };
    for (key, value) in [
        ("dtype", "bfloat16".into()),
        ("torch_dtype", "float16".into()),
        ("transformers_version", "4.30.0".into()),
        ("architectures", serde_json::json!(["LlamaForCausalLM", "LlamaModel"])),
        ("_name_or_path", "somewhere".into()),
        ("use_cache", false.into()),
        ("initializer_range", 0.5.into()),
        ("eos_token_id", 3.into()),
        ("bos_token_id", 5.into()),
        ("max_position_embeddings", 128.into()),
        ("attention_dropout", 0.1.into()),
    ] {
        assert_eq!(with(key, value), as_it_is, "{key}");
    }
    // The same rotary frequencies, spelled as older configurations do.
    let older = hash_of("gqa", &|config| {
        config.remove("rope_parameters");
        config.insert("rope_theta".into(), 10000.0.into());
    });
    assert_eq!(older, as_it_is);
    for (key, value) in [
        ("rms_norm_eps", 1e-6.into()),
        ("rope_parameters", serde_json::json!({"rope_theta": 20000.0, "rope_type": "default"})),
        ("rope_parameters", serde_json::json!({"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0})),
    ] {
        assert_ne!(with(key, value), as_it_is, "{key}");
    }

    // One file or several, in any order, with any metadata: the tensors count.
    let folder = copy("gqa");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
    let metadata = || Some([("format".to_owned(), "mlx".to_owned())].into());
    safetensors::serialize_to_file(tensors.clone(), metadata(), &folder.path().join("new")).unwrap();
    std::fs::rename(folder.path().join("new"), &path).unwrap();
    assert_eq!(Model::load(folder.path()).unwrap().hash, as_it_is);
    std::fs::remove_file(&path).unwrap();
    let mut weight_map = serde_json::Map::new();
    for (i, (name, tensor)) in tensors.iter().enumerate() {
        let shard = format!("model-{}.safetensors", 9 - i % 3);
        weight_map.insert(name.clone(), shard.clone().into());
        let same = tensors.iter().enumerate().filter(|(j, _)| j % 3 == i % 3);
        let same: Vec<_> = same.map(|(_, (name, tensor))| (name.clone(), tensor.clone())).collect();
        safetensors::serialize_to_file(same, None, &folder.path().join(shard)).unwrap();
        assert!(!tensor.data().is_empty());
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
    std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert_eq!(Model::load(folder.path()).unwrap().hash, as_it_is);

    // One weight of one layer.
    let folder = copy("gqa");
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let first = tensors.tensor("model.layers.0.self_attn.k_proj.weight").unwrap().data().as_ptr();
    let at = first as usize - bytes.as_ptr() as usize;
    assert!(at >= header);
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_ne!(Model::load(folder.path()).unwrap().hash, as_it_is);
    let hashes =
        ["gguf-f32", "gguf-f16"].map(|name| Model::load(&fixture(name).join("model.gguf")).unwrap().hash);
    assert!(hashes[0] != hashes[1] && !hashes.contains(&as_it_is));
}
