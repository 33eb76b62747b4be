//! The caches of a head and of a layer of one sequence.

use kv_attend::owner::{Layer, Windowed};

use crate::ReducedRows;

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones as
/// exact rows, all others as rows of lower rank, all with elements of type `E`, with the methods of
/// [`Windowed`].
///
/// # Examples
/// ```
/// use svd_core::{
///     Attention, HeadMaps, LowRankHeadCache, Reduction, Rows, SoftmaxStats, Window, normalize_all,
/// };
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// // Rotated keys and values of a model whose weights are folded: components of decaying scale.
/// let rows: Vec<f32> = (0..200 * 16).map(|i| noise(i) * 0.7_f32.powi((i % 16) as i32)).collect();
/// let rows = Rows::contiguous(&rows, 16)?;
/// let maps = HeadMaps::new(Reduction::folded(16, 8)?, Reduction::folded(16, 10)?);
/// let mut head = LowRankHeadCache::new(maps.into(), Window { sinks: 4, recent: 32, batch: 1 });
/// head.append(rows, rows)?;
/// assert_eq!((head.compressed(), head.size()), (164, 4 * (36 * 32 + 164 * 18)));
///
/// let mut scratch = vec![0.0; head.scratch_len(1, 1)];
/// let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
/// let (attention, query) = (Attention::scaled(0.25), rows.slice(7..8)?);
/// head.attend_into(&attention, query, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// # Ok::<(), svd_core::Error>(())
/// ```
pub type LowRankHeadCache<E> = Windowed<ReducedRows<E>, E>;

/// The keys and values of all heads of a layer for one sequence: a [`LowRankHeadCache`] per head, each at its
/// own ranks, with the methods of [`Layer`].
///
/// Keys and queries are taken after RoPE. Outputs are rotated if the values' rotation is folded into the
/// weights. With feature `rayon`, appends and attention divide the heads among the threads; results do not
/// depend on their number.
///
/// # Source
/// ZACK, 5.1: attention on rows of lower rank.
/// # Examples
/// ```
/// use svd_core::{Attention, Budget, LayerCalibration, LowRankLayerCache, Rows, Window, Workspace};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// let (heads, group, dim, prompt) = (2, 2, 16, 300);
/// // (tokens, heads, head_dim), with components of decaying scale.
/// let row = |seed: usize, n: usize| {
///     (0..n * dim).map(move |i| noise(seed + i) * 0.7_f32.powi((i % dim) as i32)).collect::<Vec<f32>>()
/// };
/// let rows = |seed: usize, n| (0..prompt).flat_map(move |t| row(seed + t * 97, n)).collect::<Vec<f32>>();
/// let (q, k, v) = (rows(1, heads * group), rows(2, heads), rows(3, heads));
/// let (keys, values) = (Rows::contiguous(&k, heads * dim)?, Rows::contiguous(&v, heads * dim)?);
/// let queries = Rows::contiguous(&q, heads * group * dim)?;
///
/// let mut calibration = LayerCalibration::new(heads, group, [dim, dim])?;
/// calibration.add(queries, keys, values)?;
/// let rotations = calibration.rotations()?;
/// let ranks = rotations.ranks(0.25, Budget::Fraction(0.5), 1)?;
///
/// let window = Window { sinks: 4, recent: 32, batch: 1 };
/// let mut cache = LowRankLayerCache::new(&rotations.maps(&ranks)?, window)?;
/// cache.append(keys, values)?; // the prompt
/// let mut workspace = Workspace::default();
/// let (query, mut out) = (row(7, heads * group), vec![0.0; heads * group * dim]);
/// cache.append(Rows::from(&row(5, heads)[..]), Rows::from(&row(6, heads)[..]))?; // a step
/// cache.attend_into(&Attention::scaled(0.25), Rows::from(&query[..]), &mut workspace, &mut out)?;
/// assert_eq!((cache.len(), cache.heads()[0].compressed()), (301, 265));
///
/// // A token and two drafts that a smaller model proposes after it.
/// cache.append(keys.slice(0..3)?, values.slice(0..3)?)?;
/// let mut out = vec![0.0; 3 * heads * group * dim];
/// cache.attend_into(&Attention::scaled(0.25), queries.slice(0..3)?, &mut workspace, &mut out)?;
/// cache.truncate(302); // the drafts are rejected
/// # Ok::<(), svd_core::Error>(())
/// ```
pub type LowRankLayerCache<E> = Layer<ReducedRows<E>, E>;
