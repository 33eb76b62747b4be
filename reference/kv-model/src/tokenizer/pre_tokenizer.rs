//! Pre-tokenizers of byte-level BPE, and the defaults that come with them, by llama.cpp's names.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

/// How a text is cut before BPE, and what llama.cpp assumes of a vocabulary that is cut this way.
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    cuts: &'static [&'static str], // expressions, each applied to the parts that the previous ones leave
    /// Whether BOS is added if the file does not say.
    pub adds_bos: bool,
    /// Whether a part that is a token is not merged from smaller ones.
    pub ignores_merges: bool,
}

const PLAIN: PreTokenizer = PreTokenizer { names: &[], cuts: &[], adds_bos: false, ignores_merges: false };

const PRE_TOKENIZERS: [PreTokenizer; 17] = [
    PreTokenizer { names: &["default"], cuts: &[PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], ..PLAIN },
    PreTokenizer {
        names: &[
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        cuts: &[GPT2],
        ..PLAIN
    },
    PreTokenizer {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        cuts: &[r"\p{N}", GPT2],
        ..PLAIN
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        cuts: &[LLAMA3],
        adds_bos: true,
        ignores_merges: true,
    },
    PreTokenizer { names: &["smaug-bpe", "dbrx"], cuts: &[LLAMA3], ..PLAIN },
    PreTokenizer {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        cuts: &[QWEN2],
        ..PLAIN
    },
    PreTokenizer { names: &["qwen35"], cuts: &[QWEN35], ..PLAIN },
    PreTokenizer { names: &["minicpm5"], cuts: &[r"\p{N}{1,3}", MINICPM5], ignores_merges: true, ..PLAIN },
    PreTokenizer { names: &["tekken"], cuts: &[TEKKEN], adds_bos: true, ignores_merges: true },
    PreTokenizer { names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], cuts: &[GPT4O], ..PLAIN },
    PreTokenizer {
        names: &["deepseek-coder"],
        cuts: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\u{d7ff}]+", r"\p{N}"],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        cuts: &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        ..PLAIN
    },
    PreTokenizer { names: &["falcon"], cuts: &[FALCON_PUNCTUATION, GPT2, "[0-9][0-9][0-9]"], ..PLAIN },
    PreTokenizer { names: &["poro-chat", "bloom", "gpt3-finnish"], cuts: &[BLOOM], ..PLAIN },
    PreTokenizer { names: &["viking"], cuts: &[BLOOM, r"\p{N}"], ..PLAIN },
    PreTokenizer { names: &["bailingmoe", "bailingmoe2", "llada-moe"], cuts: &[BAILING], ..PLAIN },
    PreTokenizer { names: &["seed-coder"], cuts: &[SEED_CODER], ..PLAIN },
];

impl PreTokenizer {
    /// The pre-tokenizer of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        PRE_TOKENIZERS.iter().find(|entry| entry.names.contains(&name))
    }

    /// The library's form: the cuts, then bytes.
    pub fn build(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let cuts = self.cuts.iter().map(|&cut| {
            let pattern = SplitPattern::Regex(cut.into());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map(PreTokenizerWrapper::from)
        });
        let bytes: PreTokenizerWrapper = ByteLevel::new(false, true, false).into();
        Ok(Sequence::new(cuts.chain([Ok(bytes)]).collect::<tokenizers::Result<_>>()?).into())
    }
}

// The expressions are those of the models' `tokenizer.json` files.

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";

const FALCON_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";

/// Llama 3, which SmolLM3 shares (llama.cpp's `smaug-bpe`).
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 2 and 3: as Llama 3, but with single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_entry_builds_and_every_name_is_one_entrys() {
        let mut names = HashSet::new();
        for entry in &PRE_TOKENIZERS {
            entry.build().unwrap();
            assert!(entry.names.iter().all(|name| names.insert(*name)), "{:?}", entry.names);
        }
        assert!(PreTokenizer::named("llama4").is_some() && PreTokenizer::named("llama5").is_none());
    }
}
