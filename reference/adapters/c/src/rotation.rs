//! Rotations of a head, and the projections that they give.

use kv_attend::{AnyRows, RowsMut, for_any_rows};
use svd_core::{Gram, MapBuf, PostRope, Rotation, rank_for_removal};

use crate::args;
use crate::error::{Error, Result, call};
use crate::rows::{kvc_rows, rows};

/// The least error of all scores at every rank (KQ-SVD): the rotation to cut ranks with.
pub const KVC_SCORE_OPTIMAL: u32 = 0;
/// The right singular vectors of stacked queries and keys (ZACK).
pub const KVC_STACKED: u32 = 1;
/// The principal directions of the rows alone; there are no queries.
pub const KVC_PRINCIPAL: u32 = 2;
/// The query-metric KLT of rows about their mean: the rotation to quantize in.
pub const KVC_QUERY_METRIC: u32 = 3;

/// The basis (dim, dim): multiplies keys or values.
pub const KVC_BASIS: u32 = 0;
/// The dual basis (dim, dim): multiplies queries, and reconstructs rows.
pub const KVC_DUAL: u32 = 1;
/// The singular values (dim,), descending.
pub const KVC_SIGMA: u32 = 2;

/// A rotation of the keys or values of one head.
pub struct kvc_rotation(Rotation);

/// The first columns of a basis.
pub struct kvc_map {
    map: MapBuf,
    rank: usize,
}

/// The widest head.
const MAX_DIM: usize = 1024;

fn gram(rows: AnyRows<'_>) -> Result<Gram<PostRope>> {
    for_any_rows!(rows, rows => {
        if rows.components() > MAX_DIM {
            return Err(svd_core::Error::TooLarge.into());
        }
        let mut gram = Gram::new(rows.components())?;
        gram.add_rows(rows)?;
        Ok(gram)
    })
}

/// Fits a rotation to stored rows (n, dim), keys with the queries of their group or values with the rows of W_O,
/// which are rows (m, dim), too. `queries` is NULL for KVC_PRINCIPAL. dim is at most 1024.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_rotation_fit(
    kind: u32,
    stored: *const kvc_rows,
    queries: *const kvc_rows,
    rotation: *mut *mut kvc_rotation,
) -> i32 {
    call(|| {
        let rotation = args::out_handle(rotation)?;
        let stored = gram(rows(stored, "rows")?)?;
        let queries = || gram(rows(queries, "queries")?);
        rotation.write(kvc_rotation(match kind {
            KVC_SCORE_OPTIMAL => Rotation::score_optimal(&stored, &queries()?)?,
            KVC_STACKED => Rotation::stacked(&stored, &queries()?)?,
            KVC_PRINCIPAL => Rotation::principal(&stored)?,
            KVC_QUERY_METRIC => Rotation::query_metric(&stored.centred(), &queries()?)?,
            value => return Err(Error::Constant { what: "kind of rotation", value }),
        }));
        Ok(())
    })
}

/// Frees a rotation; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_rotation_free(rotation: *mut kvc_rotation) {
    args::free(rotation);
}

/// Copies KVC_BASIS, KVC_DUAL or KVC_SIGMA to `out`, `len` numbers, which must be all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_rotation_copy(
    rotation: *const kvc_rotation,
    part: u32,
    out: *mut f64,
    len: usize,
) -> i32 {
    call(|| {
        let rotation = &args::get(rotation, "rotation")?.0;
        let part = match part {
            KVC_BASIS => rotation.basis(),
            KVC_DUAL => rotation.dual(),
            KVC_SIGMA => rotation.sigma(),
            value => return Err(Error::Constant { what: "part of a rotation", value }),
        };
        let out = args::slice_mut(out, len, "out")?;
        if out.len() != part.len() {
            let (what, expected, actual) = ("out", part.len(), out.len());
            return Err(svd_core::Error::Length { what, expected, actual }.into());
        }
        out.copy_from_slice(part);
        Ok(())
    })
}

/// The least rank that drops components with at most a share `removal`, 0 to 1, of the sum of the singular values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_rotation_rank(
    rotation: *const kvc_rotation,
    removal: f64,
    rank: *mut usize,
) -> i32 {
    call(|| {
        let rank = args::out(rank, "rank")?;
        rank.write(rank_for_removal(args::get(rotation, "rotation")?.0.sigma(), removal)?);
        Ok(())
    })
}

/// The first `rank` columns of KVC_BASIS or KVC_DUAL, for the decode path.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_rotation_map(
    rotation: *const kvc_rotation,
    part: u32,
    rank: usize,
    map: *mut *mut kvc_map,
) -> i32 {
    call(|| {
        let map = args::out_handle(map)?;
        let rotation = &args::get(rotation, "rotation")?.0;
        let columns = match part {
            KVC_BASIS => rotation.basis_map(rank)?,
            KVC_DUAL => rotation.dual_map(rank)?,
            value => return Err(Error::Constant { what: "basis", value }),
        };
        map.write(kvc_map { map: columns, rank });
        Ok(())
    })
}

/// Frees a map; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_map_free(map: *mut kvc_map) {
    args::free(map);
}

/// Projects rows (n, dim) to `out` (n, rank), whose length in floats is `out_len`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_map_project(
    map: *const kvc_map,
    from: *const kvc_rows,
    out: *mut f32,
    out_len: usize,
) -> i32 {
    call(|| {
        let kvc_map { map, rank } = args::get(map, "map")?;
        let out = RowsMut::contiguous(args::slice_mut(out, out_len, "out")?, *rank)?;
        for_any_rows!(rows(from, "rows")?, from => Ok(map.view().project_into(from, out)?))
    })
}

/// Reconstructs rows (n, rank), `len` floats, to `out` (n, dim) with the map of the dual basis.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_map_reconstruct(
    map: *const kvc_map,
    from: *const f32,
    len: usize,
    out: *mut f32,
    out_len: usize,
) -> i32 {
    call(|| {
        let (from, out) = (args::slice(from, len, "rows")?, args::slice_mut(out, out_len, "out")?);
        Ok(args::get(map, "map")?.map.view().reconstruct_into(from, out)?)
    })
}
