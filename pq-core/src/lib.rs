#![doc = include_str!("../README.md")]
#![no_std]
// Only the vector forms of the kernels use pointers; see `simd`.
#![deny(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

#[allow(unsafe_code)]
mod adc;
#[allow(unsafe_code)]
mod assign;
#[allow(unsafe_code)]
mod assign_one;
#[allow(unsafe_code)]
mod attend;
#[cfg(feature = "alloc")]
mod block_cache;
mod blocks;
mod centroid_sums;
mod clustering_cost;
mod codebook;
mod coded_tokens;
mod codes;
#[cfg(feature = "alloc")]
mod codes_buf;
mod codes_mut;
mod dispatch;
mod drift;
#[allow(unsafe_code)]
mod encode;
mod error;
mod gaussian_codebook;
mod group;
#[cfg(feature = "alloc")]
mod head_books;
#[cfg(feature = "alloc")]
mod head_codes;
mod hybrid;
#[cfg(feature = "alloc")]
mod kmeans;
#[cfg(feature = "alloc")]
mod layer_cache;
mod layout;
mod ln;
#[allow(unsafe_code)]
mod lut;
mod mips;
mod norm;
mod outliers;
mod pack;
#[cfg(feature = "alloc")]
mod rng;
mod rope_mean;
#[allow(unsafe_code)]
mod scan_group;
mod shape;
#[allow(unsafe_code)]
mod simd;
mod softmax;
pub mod sq;
#[cfg(feature = "alloc")]
#[allow(unsafe_code)]
mod squares;
mod token_budget;
#[allow(unsafe_code)]
mod topk;
#[cfg(feature = "alloc")]
mod train;

pub use adc::{scan_into, scan_into_with, scan_quantized_into, scan_quantized_into_with};
pub use attend::{attend_into, attend_into_with, attend_scratch_len};
#[cfg(feature = "alloc")]
pub use block_cache::{BlockCache, CacheStatistics, Eviction, Hit, Load};
pub use clustering_cost::ClusteringCost;
pub use codebook::Codebook;
#[cfg(feature = "alloc")]
pub use codebook::CodebookBuf;
pub use coded_tokens::CodedTokens;
pub use codes::{Codes, pack_codes_into};
#[cfg(feature = "alloc")]
pub use codes_buf::CodesBuf;
pub use codes_mut::CodesMut;
pub use drift::Drift;
pub use encode::{decode_into, encode_into, encode_into_with, encode_rows_into, encode_rows_into_with};
pub use error::Error;
pub use gaussian_codebook::{gaussian_centroids, gaussian_gain};
pub use group::{GroupRule, combine_group_into, combine_group_into_with};
#[cfg(feature = "alloc")]
pub use head_books::HeadBooks;
#[cfg(feature = "alloc")]
pub use head_codes::{Evicted, HeadCodes};
pub use hybrid::{
    Hybrid, HybridScratch, RowBudget, hybrid_attend_into, hybrid_attend_into_with, hybrid_select_into,
    hybrid_select_into_with,
};
pub use kv_attend::{
    AnyRows, Attention, Backend, Element, ElementType, Error as AttendError, ExactTokens, Rows, RowsMut,
    SoftmaxStats, Window, attend_exact_into, attend_exact_into_with, attend_exact_scratch_len, normalize_all,
};
#[cfg(feature = "alloc")]
pub use kv_attend::{
    Workspace,
    owner::{AnyLayer, attend_batch_into, attend_batch_into_with},
};
#[cfg(feature = "alloc")]
pub use layer_cache::{HeadCache, LayerCache};
pub use lut::{Lut, LutPrecision, Luts, QuantizedLut, lut_into, lut_into_with};
pub use mips::{Rerank, Search, SearchScratch, rerank_into, rerank_into_with, search_into, search_into_with};
pub use norm::{decode_norm, divide_by_norms, encode_norm, is_norm_scale, norm_scale};
pub use outliers::{Outlier, extract_outliers, extract_outliers_with, restore_outliers};
pub use rope_mean::RopeMean;
#[cfg(feature = "alloc")]
pub use rope_mean::RopeMeanBuf;
pub use shape::PqShape;
pub use simd::BLOCK;
pub use token_budget::TokenBudget;
pub use topk::{top_k_into, top_k_into_with};
#[cfg(feature = "alloc")]
pub use train::{
    Start, TrainOptions, Trained, train, train_batch, train_batch_with, train_with, unseen_error,
};

#[cfg(feature = "serde")]
kv_attend::serde_as_bytes!(
    CodesBuf: CodesBuf::to_bytes,
    CodebookBuf: CodebookBuf::to_bytes::<f32>,
    HeadBooks: HeadBooks::to_bytes::<f32>,
);
