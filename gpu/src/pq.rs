//! Operations of `pq-core`.

mod attend;
mod attend_any;
mod encode;
mod encode_any;
mod gather;
mod layout;
mod lut;
mod nearest;
mod scan;
mod search;
mod train;

pub use attend::{Attend, AttendArguments, AttendShape, ExactTokens, Pages};
pub use attend_any::{AttendAny, AttendAnyArguments, AttendAnyShape};
pub use encode::{Encode, EncodeArguments, EncodeShape};
pub use encode_any::{EncodeAny, EncodeAnyArguments, EncodeAnyShape};
pub use gather::{Gather, GatherArguments};
pub use layout::{CodeLayout, Side, TILE};
pub use lut::{Lut, LutArguments, LutShape};
pub use scan::{Scan, ScanArguments, ScanShape};
pub use search::{Search, SearchArguments, SearchShape};
pub use train::{Train, TrainArguments, TrainShape};
