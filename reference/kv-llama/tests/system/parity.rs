//! Logits against those of `transformers`, on the committed fixtures (see `parity/make_fixtures.py`).

use std::path::{Path, PathBuf};

use kv_llama::{logits, prefill};
use kv_model::{Model, Rope};

#[derive(serde::Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn fixtures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures");
    let mut folders: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

fn load(folder: &Path) -> Model {
    let gguf = folder.join("model.gguf");
    Model::load(if gguf.exists() { &gguf } else { folder }).unwrap()
}

#[test]
fn tokens_agree_with_sentencepiece() {
    #[derive(serde::Deserialize)]
    struct Text {
        text: String,
        tokens: Vec<u32>,
    }
    let folder = fixtures().into_iter().find(|folder| folder.ends_with("gguf-sentencepiece")).unwrap();
    let texts: Vec<Text> =
        serde_json::from_slice(&std::fs::read(folder.join("texts.json")).unwrap()).unwrap();
    let model = load(&folder);
    let tokenizer = model.tokenizer().unwrap();
    for Text { text, tokens } in texts {
        assert_eq!(tokenizer.encode(&text).unwrap(), tokens, "{text}");
        assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    }
    let words = tokenizer.words();
    assert!(words.len() > 10);
    for word in words {
        let word = tokenizer.decode(&[word]).unwrap();
        assert!(word.len() >= 3 && word.bytes().all(|b| b.is_ascii_alphabetic()), "{word}");
    }
    // A piece inside a text has no leading space.
    let pieces = ["\nThe key is ", "12345", ".\n"].map(|piece| tokenizer.encode_piece(piece).unwrap());
    assert_eq!(
        tokenizer.decode(&[tokenizer.encode("a").unwrap(), pieces.concat()].concat()).unwrap(),
        "a\nThe key is 12345.\n"
    );
}

#[test]
fn logits_agree_with_transformers() {
    let fixtures = fixtures();
    assert!(fixtures.len() == 28);
    for folder in fixtures {
        let expected: Expected =
            serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let model = load(&folder);
        let rope = Rope::new(&model.config, expected.tokens.len());
        let hidden = prefill(&model, &rope, &expected.tokens, &mut |_, _| Ok(())).unwrap();
        let ours = logits(&model, &hidden).unwrap();
        let theirs = expected.logits.concat();
        assert_eq!(ours.len(), theirs.len());
        let largest = theirs.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
        let error = ours.iter().zip(&theirs).fold(0.0_f32, |a, (x, y)| a.max((x - y).abs()));
        assert!(error < 1e-5 * largest, "{}: {error} of {largest}", folder.display());
    }
}
