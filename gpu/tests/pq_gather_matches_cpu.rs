//! Gathering hits from a block cache and misses from pinned host memory gives the requested rows.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Buffer, Random, SIDES, Side, device};
use kv_gpu::pq::{Gather, GatherArguments, HeldRows};
use kv_gpu::{DevicePtr, Error};
use pq_core::{BlockCache, Eviction};

const HEADS: usize = 3;
const N: usize = 1000;
const BLOCK: usize = 16;
const CAPACITY: usize = 8; // blocks

#[test]
fn hits_and_misses_become_the_rows() {
    let Some(device) = device("hits_and_misses_become_the_rows") else { return };
    for (seed, row_bytes) in [(1, 16), (2, 128), (3, 256), (4, 512), (5, 256)] {
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
            held: None,
        };
        let pinned = |side: Side| DevicePtr::new(host[side as usize].as_ptr().unwrap() as u64).unwrap();
        let launches = [
            from(cached[0].pointer(), cached[1].pointer(), CAPACITY * BLOCK, &lists[..3]),
            from(pinned(Side::Keys), pinned(Side::Values), N, &lists[3..]),
        ];
        for arguments in &launches {
            // SAFETY: the buffers live until their contents have been read, and have the lengths that the
            // shape requires.
            #[allow(unsafe_code)]
            unsafe { gather.launch(device.stream().cu_stream(), arguments) }.unwrap();
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
fn held_rows_and_others_become_the_rows_and_are_held() {
    const N: u32 = 500;
    const SLOTS: usize = 60;
    let Some(device) = device("held_rows_and_others") else { return };
    let mut random = Random(7);
    let mut shuffled = |n: u32, len: usize| {
        let mut all: Vec<u32> = (0..n).collect();
        (0..all.len()).for_each(|i| all.swap(i, random.below(n as usize)));
        all.truncate(len);
        all
    };
    let (row_bytes, list_len) = (256, 40);
    let row = |side: usize, head: usize, token: u32| -> Vec<u8> {
        (0..row_bytes).map(|i| ((side + 3 * head + 7 * token as usize) * 31 + i * i) as u8).collect()
    };
    for hits in [0, 1, 17, 40] {
        // The first tokens of each list are held, in the first of its slots.
        let tokens: Vec<Vec<u32>> = (0..HEADS).map(|_| shuffled(N, list_len)).collect();
        let slots: Vec<Vec<u32>> = (0..HEADS).map(|_| shuffled(SLOTS as u32, list_len)).collect();
        let places: Vec<Vec<u32>> = (0..HEADS).map(|_| shuffled(list_len as u32, list_len)).collect();
        let mut held = SIDES.map(|_| vec![0xee_u8; HEADS * SLOTS * row_bytes]);
        let mut slot_of_place = vec![0; HEADS * list_len];
        for (head, i) in (0..HEADS).flat_map(|head| (0..list_len).map(move |i| (head, i))) {
            slot_of_place[head * list_len + places[head][i] as usize] = slots[head][i];
            if i < hits {
                for (side, held) in held.iter_mut().enumerate() {
                    let at = (head * SLOTS + slots[head][i] as usize) * row_bytes;
                    held[at..][..row_bytes].copy_from_slice(&row(side, head, tokens[head][i]));
                }
            }
        }
        let part = |lists: &[Vec<u32>], from: usize| -> Vec<u32> {
            lists.iter().flat_map(|list| list[from..].iter().chain(&list[..from])).copied().collect()
        };
        let host = SIDES.map(|side| {
            let rows = (0..HEADS).flat_map(|head| (0..N).flat_map(move |t| row(side as usize, head, t)));
            Buffer::new(&device, &rows.collect::<Vec<u8>>())
        });
        let lists = [part(&tokens, hits), part(&places, hits), part(&places, 0), slot_of_place];
        let lists = lists.map(|list| Buffer::new(&device, &list));
        let counts = [list_len - hits, hits].map(|n| Buffer::new(&device, &[n as u32; HEADS]));
        let held = held.map(|held| Buffer::new(&device, &held));
        let out = SIDES.map(|_| Buffer::new(&device, &vec![0_u8; HEADS * list_len * row_bytes]));
        let arguments = GatherArguments {
            heads: HEADS,
            keys: host[0].pointer(),
            values: host[1].pointer(),
            head_rows: N as usize,
            rows: lists[0].pointer(),
            places: Some(lists[1].pointer()),
            counts: Some(counts[0].pointer()),
            list_len,
            keys_out: out[0].pointer(),
            values_out: out[1].pointer(),
            out_len: list_len,
            held: Some(HeldRows {
                keys: held[0].pointer(),
                values: held[1].pointer(),
                len: SLOTS,
                slots: lists[3].pointer(),
                hits: lists[2].pointer(),
                hit_counts: counts[1].pointer(),
            }),
        };
        let gather = Gather::new(&device, row_bytes).unwrap();
        // SAFETY: the buffers live until their contents have been read, and have the lengths that the
        // arguments say; slots and places of a list differ.
        #[allow(unsafe_code)]
        unsafe { gather.launch(device.stream().cu_stream(), &arguments) }.unwrap();
        for side in 0..2 {
            let (out, held) = (out[side].read(), held[side].read());
            for (head, i) in (0..HEADS).flat_map(|head| (0..list_len).map(move |i| (head, i))) {
                let expected = row(side, head, tokens[head][i]);
                let at = |rows: usize, row: u32| (head * rows + row as usize) * row_bytes;
                let (place, slot) = (at(list_len, places[head][i]), at(SLOTS, slots[head][i]));
                assert!(out[place..][..row_bytes] == expected[..], "{hits} hits: head {head}, entry {i}");
                assert!(held[slot..][..row_bytes] == expected[..], "{hits} hits: head {head}, slot of {i}");
            }
        }
    }
}

#[test]
fn odd_rows_are_errors() {
    for row_bytes in [0, 8, 100, 1 << 20] {
        assert!(matches!(Gather::program(row_bytes), Err(Error::Unsupported { .. })), "{row_bytes}");
    }
}
