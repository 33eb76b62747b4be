//! Which tokens of prompts run together.

use kv_device::Chunk;

use super::Prompt;
use crate::gemv::MOST_COLUMNS;

/// Maximum groups of a segment, whose residual streams are all held.
const MOST_GROUPS: usize = 8;

/// Tokens that pass through one layer after the other: weights are unpacked once for all of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Segment {
    pub tokens: Vec<u32>,
    pub groups: Vec<Group>,
}

/// Tokens of a segment whose products run together.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Group {
    pub start: usize, // in the segment
    pub count: usize,
    pub pieces: Vec<Piece>,
}

/// Tokens of a group that attend together: a chunk of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub chunk: Chunk,
    pub start: usize,  // in the group
    pub index: usize,  // among all pieces of the segment
    pub is_last: bool, // of the prompt
}

/// The most of a segment that buffers have room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    pub group: usize,   // tokens
    pub segment: usize, // tokens
    pub pieces: usize,
}

impl Segment {
    fn pieces(&self) -> usize {
        self.groups.iter().map(|group| group.pieces.len()).sum()
    }

    /// Adds a chunk of a prompt to the last group, or to a new one if that has no room for it.
    fn push(&mut self, chunk: Chunk, tokens: &[u32], is_last: bool, room: usize) {
        let index = self.pieces();
        if self.groups.last().is_none_or(|group| group.count + chunk.count > room) {
            self.groups.push(Group { start: self.tokens.len(), ..Group::default() });
        }
        if let Some(group) = self.groups.last_mut() {
            group.pieces.push(Piece { chunk, start: group.count, index, is_last });
            group.count += chunk.count;
        }
        self.tokens.extend(tokens);
    }

    /// Whether a chunk begins another segment.
    fn is_full(&self, count: usize, room: usize) -> bool {
        self.groups.len() == MOST_GROUPS && self.groups.last().is_some_and(|group| group.count + count > room)
    }
}

/// Prompts in segments, in order. A prompt is cut into chunks of `chunk` tokens; a group has as many chunks
/// of one prompt or several as have no more tokens in all than that, or than a step.
pub(super) fn segments(prompts: &[Prompt<'_>], chunk: usize) -> Vec<Segment> {
    let room = chunk.max(MOST_COLUMNS);
    let mut segments = vec![Segment::default()];
    for prompt in prompts {
        let mut position = prompt.start;
        for tokens in prompt.tokens.chunks(chunk) {
            let count = tokens.len();
            if segments.last().is_none_or(|segment| segment.is_full(count, room)) {
                segments.push(Segment::default());
            }
            let chunk = Chunk { sequence: prompt.sequence, position, count };
            position += count;
            if let Some(segment) = segments.last_mut() {
                segment.push(chunk, tokens, position == prompt.end(), room);
            }
        }
    }
    segments
}

impl Sizes {
    /// What these segments need.
    pub fn of(segments: &[Segment]) -> Self {
        let most = |of: fn(&Segment) -> usize| segments.iter().map(of).max().unwrap_or(0);
        Self {
            group: most(|segment| segment.groups.iter().map(|group| group.count).max().unwrap_or(0)),
            segment: most(|segment| segment.tokens.len()),
            pieces: most(Segment::pieces),
        }
    }

    /// The larger of each.
    pub fn max(self, other: Self) -> Self {
        Self {
            group: self.group.max(other.group),
            segment: self.segment.max(other.segment),
            pieces: self.pieces.max(other.pieces),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (sequence, start, tokens) of prompts: what runs together, as (sequence, position, count) of pieces.
    fn groups(prompts: &[(usize, usize, usize)], chunk: usize) -> Vec<Vec<Vec<(usize, usize, usize)>>> {
        let all: Vec<u32> = (0..10_000).collect();
        let prompts: Vec<Prompt<'_>> = prompts
            .iter()
            .map(|&(sequence, start, count)| Prompt { sequence, start, tokens: &all[start..][..count] })
            .collect();
        let segments = segments(&prompts, chunk);
        let sizes = Sizes::of(&segments);
        for segment in &segments {
            let mut end = 0;
            for group in &segment.groups {
                assert_eq!(group.start, end);
                end += group.count;
                assert!(group.count <= sizes.group && end <= sizes.segment);
                for Piece { chunk, start, is_last, .. } in &group.pieces {
                    let tokens = &segment.tokens[group.start + start..][..chunk.count];
                    assert_eq!(tokens, &all[chunk.position..chunk.end()], "tokens are their positions");
                    let prompt = prompts.iter().find(|prompt| prompt.sequence == chunk.sequence).unwrap();
                    assert_eq!(*is_last, chunk.end() == prompt.end());
                }
            }
            let indices = segment.groups.iter().flat_map(|group| &group.pieces).map(|piece| piece.index);
            assert!(indices.eq(0..segment.pieces()) && segment.pieces() <= sizes.pieces);
        }
        let of_piece = |Piece { chunk, .. }: &Piece| (chunk.sequence, chunk.position, chunk.count);
        let of_group = |group: &Group| group.pieces.iter().map(of_piece).collect();
        segments.iter().map(|segment| segment.groups.iter().map(of_group).collect()).collect()
    }

    #[test]
    fn prompts_share_groups_of_a_chunks_tokens() {
        assert_eq!(groups(&[(0, 7, 5)], 64), [[[(0, 7, 5)]]]);
        let together = groups(&[(2, 0, 40), (0, 10, 20), (1, 0, 30)], 64);
        assert_eq!(together, [vec![vec![(2, 0, 40), (0, 10, 20)], vec![(1, 0, 30)]]]);
        let cut = groups(&[(0, 0, 100), (1, 0, 100)], 64);
        assert_eq!(cut, [[[(0, 0, 64)], [(0, 64, 36)], [(1, 0, 64)], [(1, 64, 36)]]]);
    }

    #[test]
    fn groups_have_room_for_the_tokens_of_a_step() {
        assert_eq!(groups(&[(0, 0, 3), (1, 0, 2)], 2), [[[(0, 0, 2), (0, 2, 1), (1, 0, 2)]]]);
    }

    #[test]
    fn segments_have_eight_groups() {
        let segments = groups(&[(0, 0, 640), (1, 0, 10)], 64);
        let counts: Vec<usize> = segments.iter().map(Vec::len).collect();
        assert_eq!(counts, [8, 3]);
        assert_eq!(segments[1], [[(0, 512, 64)], [(0, 576, 64)], [(1, 0, 10)]]);
    }
}
