//! The tokens that end a text, by their names.

use std::collections::{BTreeSet, HashMap};

/// Ends of sequences, turns and messages, under the names that models give them: llama.cpp ends a text at each of
/// them, whatever else a file says.
const ENDS: [&str; 33] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
    // Ends of files and repositories, in models that fill in the middle of code.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<|file_sep|>",
    "<reponame>",
];

/// Whether a token of this name ends a text.
pub(super) fn is_end(token: &str) -> bool {
    ENDS.contains(&token)
}

/// The ends of texts among the tokens of a vocabulary.
pub(super) fn ends<'a>(tokens: impl Iterator<Item = (u32, &'a str)>) -> BTreeSet<u32> {
    let named: HashMap<&str, u32> =
        tokens.filter(|(_, token)| is_end(token)).map(|(id, token)| (token, id)).collect();
    let mut ends: BTreeSet<u32> = named.values().copied().collect();
    let has = |token: &str| named.contains_key(token);
    let mut spare = |token: &str| named.get(token).map(|id| ends.remove(id));
    // Such models end a message by a call, a return or a flush, and only a part of it by `<|end|>`.
    if (has("<|call|>") || has("<|calls|>")) && (has("<|return|>") || has("<|flush|>")) {
        spare("<|end|>");
    }
    // There `</s>` is a word of HTML.
    if has("<|tool_response>") {
        spare("</s>");
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_known_by_name() {
        let of = |tokens: &[&str]| ends((0..).zip(tokens.iter().copied())).into_iter().collect::<Vec<_>>();
        assert_eq!(of(&["a", "</s>", "<|eot_id|>", "<s>"]), [1, 2]);
        assert_eq!(of(&["<|end|>", "x"]), [0]);
        assert_eq!(of(&["<|end|>", "<|return|>", "<|call|>"]), [1, 2]);
        assert_eq!(of(&["<|end|>", "<|flush|>", "<|calls|>"]), [1, 2]);
        assert_eq!(of(&["</s>", "<|tool_response>"]), [1]);
    }
}
