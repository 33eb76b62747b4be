//! Retrieval tasks: facts hidden in a text, and questions whose answers must come back exactly.

use kv_llama::Rng;
use kv_model::Tokenizer;

use crate::{Error, Result};

/// A question about a prompt: its tokens, and those of the expected answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The question, up to the start of the answer.
    pub ask: Vec<u32>,
    /// The exact answer.
    pub answer: Vec<u32>,
}

/// A prompt with facts in it, and questions about them. The questions are independent of each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetrievalTask {
    /// Text with the facts.
    pub prompt: Vec<u32>,
    /// One per fact.
    pub questions: Vec<Question>,
}

/// Minimum number of vocabulary words to draw names from.
const FEWEST_WORDS: usize = 100;

/// Why there is no [`TaskMaker`].
pub const NO_WORDS: &str =
    "the vocabulary has too few plain words for retrieval tasks: their columns stay empty";

/// Generates tasks in the formats that the shipped model was trained on; an instruction-tuned model with
/// ChatML markers gets the needle question as a chat.
pub struct TaskMaker<'a> {
    tokenizer: &'a Tokenizer,
    words: Vec<u32>,
    chat: bool,
    rng: Rng,
}

impl<'a> TaskMaker<'a> {
    /// A task generator; equal seeds give equal tasks. `None` when the vocabulary lacks plain words for
    /// names.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, seed: u64) -> Option<Self> {
        let words = tokenizer.words();
        let chat = tokenizer.token_id("<|im_start|>").is_some();
        (words.len() >= FEWEST_WORDS).then_some(Self { tokenizer, words, chat, rng: Rng(seed) })
    }

    /// `n` pass keys in a haystack of text, `length` tokens in all. They lie at random depths, or
    /// consecutively from `depth` (0 start, 1 end) on.
    ///
    /// # Errors
    /// [`Error::Argument`] when the text is too short or `length` too small for the needles.
    pub fn needle(
        &mut self,
        text: &[u32],
        length: usize,
        n: usize,
        depth: Option<f64>,
    ) -> Result<RetrievalTask> {
        self.check_count(n, length)?;
        let facts = (0..n)
            .map(|_| {
                let (name, key) = (self.name(), self.digits(5)?);
                let fact = self.join(&[&"\nThe pass key of", &name, &" is ", &key, &".\n"])?;
                let asked = if self.chat {
                    let user = self.join(&[&"\n\nWhat is the pass key of", &name, &"?<|im_end|>\n"])?;
                    let begun = self.join(&[&"<|im_start|>assistant\nThe pass key of", &name, &" is "])?;
                    [user, begun].concat()
                } else {
                    self.join(&[&"\nWhat is the pass key of", &name, &"? The pass key of", &name, &" is "])?
                };
                Ok((fact, Question { ask: asked, answer: key }))
            })
            .collect::<Result<Vec<_>>>()?;
        let opening = if self.chat { self.tokenizer.encode_piece("<|im_start|>user\n")? } else { vec![] };
        self.hide(opening, text, length, facts, depth)
    }

    /// `n` lines of a name and four digits in one block at `depth` (0 start, 1 end) of the text; each
    /// question is a line with the name.
    ///
    /// # Errors
    /// As [`Self::needle`].
    pub fn recall(&mut self, text: &[u32], length: usize, n: usize, depth: f64) -> Result<RetrievalTask> {
        self.check_count(n, length)?;
        let newline = self.tokenizer.encode_piece("\n")?;
        let mut block = newline.clone();
        let mut questions = vec![];
        for _ in 0..n {
            let (name, key) = (self.name(), self.digits(4)?);
            block.extend(self.join(&[&name, &": ", &key, &"\n"])?);
            questions.push(Question { ask: self.join(&[&name, &": "])?, answer: key });
        }
        let hidden = block.len() + newline.len();
        let Some(room) = length.checked_sub(hidden).filter(|&room| room <= text.len()) else {
            return Err(too_small(length, hidden, text.len()));
        };
        let (before, after) = text[..room].split_at((depth.clamp(0.0, 1.0) * room as f64) as usize);
        Ok(RetrievalTask { prompt: [before, &block, after, &newline].concat(), questions })
    }

    /// Rejects more facts than prompt tokens before any is generated.
    fn check_count(&self, n: usize, length: usize) -> Result<()> {
        if n > length {
            return Err(Error::Argument(format!("a prompt of {length} tokens has no room for {n} facts")));
        }
        Ok(())
    }

    fn hide(
        &mut self,
        opening: Vec<u32>,
        text: &[u32],
        length: usize,
        facts: Vec<(Vec<u32>, Question)>,
        depth: Option<f64>,
    ) -> Result<RetrievalTask> {
        let hidden = opening.len() + facts.iter().map(|(fact, _)| fact.len()).sum::<usize>();
        let Some(room) = length.checked_sub(hidden).filter(|&room| room <= text.len()) else {
            return Err(too_small(length, hidden, text.len()));
        };
        let mut cuts: Vec<usize> = match depth {
            Some(depth) => vec![(depth.clamp(0.0, 1.0) * room as f64) as usize; facts.len()],
            None => facts.iter().map(|_| self.rng.below(room + 1)).collect(),
        };
        cuts.sort_unstable();
        let mut prompt = opening;
        let mut questions = vec![];
        let mut last = 0;
        for (cut, (fact, question)) in cuts.into_iter().zip(facts) {
            prompt.extend_from_slice(&text[last..cut]);
            prompt.extend_from_slice(&fact);
            questions.push(question);
            last = cut;
        }
        prompt.extend_from_slice(&text[last..room]);
        Ok(RetrievalTask { prompt, questions })
    }

    fn name(&mut self) -> Vec<u32> {
        (0..2).map(|_| self.words[self.rng.below(self.words.len())]).collect()
    }

    fn digits(&mut self, n: usize) -> Result<Vec<u32>> {
        let text: String = (0..n).map(|_| char::from(b'0' + self.rng.below(10) as u8)).collect();
        Ok(self.tokenizer.encode_piece(&text)?)
    }

    /// Pieces are tokenized separately, as in the shipped model's training.
    fn join(&self, pieces: &[&dyn Piece]) -> Result<Vec<u32>> {
        let mut tokens = vec![];
        for piece in pieces {
            tokens.extend(piece.tokens(self.tokenizer)?);
        }
        Ok(tokens)
    }
}

fn too_small(length: usize, facts: usize, text: usize) -> Error {
    Error::Argument(format!(
        "a prompt of {length} tokens cannot be made: its facts are {facts} tokens, and the text has {text} for the rest"
    ))
}

/// A text, or tokens.
trait Piece {
    fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>>;
}

impl Piece for &str {
    fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        Ok(tokenizer.encode_piece(self)?)
    }
}

impl Piece for Vec<u32> {
    fn tokens(&self, _: &Tokenizer) -> Result<Vec<u32>> {
        Ok(self.clone())
    }
}
