//! Operations of `pq-core`: product quantization.

mod addends;
mod append;
mod attend;
mod attend_generic;
mod clusters;
mod encode;
mod encode_generic;
mod gather;
mod gather_attend;
mod hybrid;
mod layout;
mod lut;
mod nearest;
mod rope_mean_scores;
mod scan;
mod search;
mod select;
mod train;

pub use addends::Addends;
pub use append::{Append, AppendArguments, AppendShape};
pub use attend::{Attend, AttendArguments, AttendShape, ExactTokens, Norms, Pages};
pub use attend_generic::{AttendGeneric, AttendGenericArguments, AttendGenericShape};
pub use encode::{Encode, EncodeArguments, EncodeShape};
pub use encode_generic::{EncodeGeneric, EncodeGenericArguments, EncodeGenericShape};
pub use gather::{Gather, GatherArguments, Prefetch};
pub use gather_attend::{GatherAttend, GatherAttendArguments, GatherAttendShape, MissingRows};
pub use hybrid::{ExactRows, Hybrid, HybridArguments, HybridShape, RowIndex};
pub use kv_attend::owner::Side;
pub use layout::{CodeLayout, Paging, TILE};
pub use lut::{Lut, LutArguments, LutShape};
pub use rope_mean_scores::{RopeMeanScores, RopeMeanScoresArguments, RopeMeanScoresShape};
pub use scan::{Scan, ScanArguments, ScanShape};
pub use search::{Search, SearchArguments, SearchShape};
pub use select::{ErrorBound, Select, SelectArguments, SelectShape};
pub use train::{Train, TrainArguments, TrainShape};
