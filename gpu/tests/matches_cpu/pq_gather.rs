//! Gathering hits from a block cache and misses from pinned host memory gives the requested rows.

use kv_gpu::pq::{Gather, GatherArguments, Prefetch};
use kv_gpu::{DevicePtr, Error};
use pq_core::{BlockCache, Eviction};

use crate::common::{Buffer, Random, SIDES, Side, device, launch};

const HEADS: usize = 3;
const N: usize = 1000;
const BLOCK: usize = 16;
const CAPACITY: usize = 8; // blocks

#[test]
fn hits_and_misses_become_the_rows() {
    let Some(device) = device("hits_and_misses_become_the_rows") else { return };
    for (seed, row_bytes) in [(1, 16), (2, 128), (3, 256), (4, 512), (5, 256), (6, 592), (7, 1040)] {
        let mut random = Random(seed);
        let wanted_len = 1 + random.below(200);
        // SAFETY: written before it is read.
        #[allow(unsafe_code)]
        let mut host =
            SIDES.map(|_| unsafe { device.context().alloc_pinned::<u8>(HEADS * N * row_bytes) }.unwrap());
        for host in &mut host {
            host.as_mut_slice().unwrap().copy_from_slice(&random.bytes(HEADS * N * row_bytes));
        }
        let rows_of = |side: Side, head: usize, token: usize| {
            host[side as usize].as_slice().unwrap()[(head * N + token) * row_bytes..][..row_bytes].to_vec()
        };

        // One cache per head, filled by an earlier step.
        let mut cached = SIDES.map(|_| vec![0_u8; HEADS * CAPACITY * BLOCK * row_bytes]);
        let (mut hit_rows, mut hit_places) =
            (vec![0_u32; HEADS * wanted_len], vec![0_u32; HEADS * wanted_len]);
        let (mut miss_rows, mut miss_places) = (hit_rows.clone(), hit_rows.clone());
        let (mut hit_counts, mut miss_counts) = (vec![0_u32; HEADS], vec![0_u32; HEADS]);
        let mut wanted: Vec<Vec<u32>> = Vec::new();
        for head in 0..HEADS {
            let mut cache = BlockCache::new(BLOCK, CAPACITY, Eviction::LeastRecentlyUsed);
            let mut earlier: Vec<u32> = (0..150).map(|_| random.below(N) as u32).collect();
            earlier.sort_unstable();
            earlier.dedup();
            for load in cache.update(&earlier, CAPACITY) {
                for offset in 0..BLOCK.min(N - load.block as usize * BLOCK) {
                    for (side, cached) in SIDES.into_iter().zip(&mut cached) {
                        let row = rows_of(side, head, load.block as usize * BLOCK + offset);
                        let at = (head * CAPACITY + load.slot as usize) * BLOCK + offset;
                        cached[at * row_bytes..][..row_bytes].copy_from_slice(&row);
                    }
                }
            }
            let mut tokens: Vec<u32> = (0..N as u32).collect();
            (0..N).for_each(|i| tokens.swap(i, random.below(N)));
            tokens.truncate(wanted_len);
            tokens.sort_unstable();
            let (mut hits, mut misses) = (Vec::new(), Vec::new());
            cache.look_up(&tokens, &mut hits, &mut misses);
            let place = |token: u32| tokens.binary_search(&token).unwrap() as u32;
            for (i, hit) in hits.iter().enumerate() {
                hit_rows[head * wanted_len + i] = hit.row as u32;
                hit_places[head * wanted_len + i] = place(hit.token);
            }
            for (i, &miss) in misses.iter().enumerate() {
                miss_rows[head * wanted_len + i] = miss;
                miss_places[head * wanted_len + i] = place(miss);
            }
            hit_counts[head] = hits.len() as u32;
            miss_counts[head] = misses.len() as u32;
            wanted.push(tokens);
        }
        let cached = cached.map(|cached| Buffer::new(&device, &cached));
        let lists = [hit_rows, hit_places, hit_counts, miss_rows, miss_places, miss_counts]
            .map(|list| Buffer::new(&device, &list));
        let out = SIDES.map(|_| Buffer::new(&device, &vec![0_u8; HEADS * wanted_len * row_bytes]));
        let gather = Gather::new(&device, row_bytes).unwrap();
        let from = |keys, values, head_rows: usize, lists: &[Buffer<u32>]| GatherArguments {
            heads: HEADS,
            keys,
            values,
            head_rows,
            rows: lists[0].pointer(),
            places: Some(lists[1].pointer()),
            counts: Some(lists[2].pointer()),
            list_len: wanted_len,
            keys_out: out[0].pointer(),
            values_out: out[1].pointer(),
            out_len: wanted_len,
            prefetch: Some(Prefetch { bytes: out[0].pointer(), len: HEADS * wanted_len * row_bytes }),
        };
        let pinned = |side: Side| DevicePtr::new(host[side as usize].as_ptr().unwrap() as u64).unwrap();
        let launches = [
            from(cached[0].pointer(), cached[1].pointer(), CAPACITY * BLOCK, &lists[..3]),
            from(pinned(Side::Keys), pinned(Side::Values), N, &lists[3..]),
        ];
        for arguments in &launches {
            launch!(device, gather, arguments);
        }
        for (side, out) in SIDES.into_iter().zip(&out) {
            for (i, row) in out.read().chunks_exact(row_bytes).enumerate() {
                let (head, token) = (i / wanted_len, wanted[i / wanted_len][i % wanted_len]);
                assert!(row == rows_of(side, head, token as usize), "{side:?} of head {head} token {token}");
            }
        }
    }
}

#[test]
fn odd_rows_are_errors() {
    for row_bytes in [0, 8, 100, 1 << 20] {
        assert!(matches!(Gather::program(row_bytes, (9, 0)), Err(Error::Unsupported { .. })), "{row_bytes}");
    }
}
