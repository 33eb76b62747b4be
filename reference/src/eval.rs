//! The quality harness: perplexity, divergence, top-1 agreement and retrieval of a cache.

pub mod metrics;
pub mod retrieval;
mod run;

pub use metrics::{Divergence, kl_divergence};
pub use retrieval::{Question, RetrievalTask};
pub use run::{Prompt, SharedPrompt, TextScores, answer_questions, score_text, window_perplexity};
