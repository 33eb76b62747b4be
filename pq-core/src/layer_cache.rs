//! The caches of a head and of a layer of one sequence.

use kv_attend::owner::{Layer, Windowed};

use crate::HeadCodes;

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones as
/// exact rows of `E`, all others as codes, with the methods of [`Windowed`].
///
/// # Examples
/// ```
/// use pq_core::*;
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// # let keys: Vec<f32> = (0..200 * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// let keys = Rows::contiguous(&keys, 16)?; // 200 tokens, whose values are the keys
/// let shapes = [PqShape::new(16, 8, 6)?; 2];
/// let books = HeadBooks::train_layer(keys, keys, 1, shapes, &TrainOptions::default())?;
/// let mut head = HeadCache::new(books[0].clone(), Window { sinks: 4, recent: 32, batch: 16 });
/// let evicted = head.append(keys, keys)?;
/// assert_eq!((head.sinks(), head.compressed(), head.recent()), (4, evicted.tokens, 36));
///
/// let queries = [0.1_f32; 2 * 16]; // two query heads
/// let mut scratch = vec![0.0; head.scratch_len(1, 2)];
/// let (mut out, mut stats) = ([0.0; 2 * 16], [SoftmaxStats::EMPTY; 2]);
/// let attention = Attention::scaled(0.25);
/// head.attend_into(&attention, Rows::from(&queries[..]), &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert!((out[5] - 8.0).abs() < 1.0);
/// # Ok::<(), Error>(())
/// ```
pub type HeadCache<E> = Windowed<HeadCodes, E>;

/// The keys and values of all heads of a layer for one sequence: a [`HeadCache`] per head, with the methods
/// of [`Layer`].
///
/// With feature `rayon`, appends and attention divide the heads among the threads; results do not depend on
/// their number.
///
/// # Examples
/// ```
/// use pq_core::{Attention, HeadBooks, LayerCache, PqShape, Rows, TrainOptions, Window, Workspace};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let (heads, group, dim, prompt) = (2, 2, 16, 300);
/// // (tokens, heads, head_dim); a channel of keys usually has an offset.
/// let row = |t: usize| (0..heads * dim).map(move |i| noise(t * 31 + i) + if i % dim == 5 { 8.0 } else { 0.0 });
/// let keys: Vec<f32> = (0..prompt).flat_map(row).collect();
/// let (keys, shape) = (Rows::contiguous(&keys, heads * dim)?, PqShape::new(dim, 8, 6)?);
///
/// let books = HeadBooks::train_layer(keys, keys, heads, [shape; 2], &TrainOptions::default())?;
/// let mut cache = LayerCache::new(&books, Window { sinks: 4, recent: 32, batch: 16 })?;
/// cache.append(keys, keys)?; // the prompt
/// let mut workspace = Workspace::default();
/// for t in prompt..prompt + 20 {
///     let new: Vec<f32> = row(t).collect();
///     cache.append(Rows::from(&new[..]), Rows::from(&new[..]))?;
///     let queries: Vec<f32> = (0..heads * group * dim).map(|i| noise(t + i)).collect();
///     let mut out = vec![0.0; heads * group * dim];
///     cache.attend_into(&Attention::scaled(0.25), Rows::from(&queries[..]), &mut workspace, &mut out)?;
/// }
/// assert_eq!((cache.len(), cache.heads()[0].recent()), (320, 44));
/// let restored = LayerCache::<f32>::from_bytes(&cache.to_bytes(), &books)?;
/// assert_eq!(restored.size(), cache.size());
/// # Ok::<(), pq_core::Error>(())
/// ```
///
/// Several query tokens, and a batch of sequences:
/// ```
/// use pq_core::*;
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// # let keys: Vec<f32> = (0..200 * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// # let keys = Rows::contiguous(&keys, 16)?; // 200 tokens of one head
/// # let shapes = [PqShape::new(16, 8, 6)?; 2];
/// # let books = HeadBooks::train_layer(keys, keys, 1, shapes, &TrainOptions::default())?;
/// let mut cache = LayerCache::new(&books, Window { sinks: 4, recent: 32, batch: 16 })?;
/// let mut other = cache.clone(); // shares the codebooks
/// cache.append(keys.slice(0..196)?, keys.slice(0..196)?)?;
/// // A token and three drafts that a smaller model proposes after it, with two query heads each.
/// cache.append(keys.slice(196..200)?, keys.slice(196..200)?)?;
/// let queries: Vec<f32> = (0..4 * 2 * 16).map(noise).collect();
/// let mut out = vec![0.0; 4 * 2 * 16];
/// let (queries, mut workspace) = (Rows::contiguous(&queries, 2 * 16)?, Workspace::default());
/// cache.attend_into(&Attention::scaled(0.25), queries, &mut workspace, &mut out)?;
/// cache.truncate(198); // two drafts are rejected
///
/// other.append(keys.slice(0..7)?, keys.slice(0..7)?)?;
/// let (attention, queries) = (Attention::scaled(0.25), queries.slice(0..2)?); // one token of each sequence
/// attend_batch_into(&[&cache, &other], &attention, queries, &mut workspace, &mut out[..2 * 2 * 16])?;
/// # Ok::<(), Error>(())
/// ```
pub type LayerCache<E> = Layer<HeadCodes, E>;
