//! The quality harness: what a cache costs in perplexity, divergence, agreement and retrieval.

pub mod metrics;
pub mod retrieval;
mod run;

pub use metrics::{Divergence, kl_divergence, log_softmax};
pub use retrieval::{Question, RetrievalTask};
pub use run::{Prompt, SharedPrompt, TextScores, answer_questions, score_text, window_perplexity};
