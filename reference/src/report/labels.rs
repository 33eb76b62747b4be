//! Labels of points in a chart that do not overlap.

use super::SIZE;

/// Pixels of a label's line.
pub(super) const LABEL_HEIGHT: i32 = 12;
/// Pixels of a wide character.
const LABEL_CHAR: i32 = 7;
/// A point's radius in pixels.
pub(super) const DOT: i32 = 4;

/// Occupied rectangles, of points and then of their labels: (left, top, right, bottom) in pixels.
pub struct Labels(pub Vec<(i32, i32, i32, i32)>);

impl Labels {
    /// Points at these pixels, without labels.
    pub fn new(points: impl Iterator<Item = (i32, i32)>) -> Self {
        Self(points.map(|(x, y)| (x - DOT, y - DOT, x + DOT, y + DOT)).collect())
    }

    /// Places a label of `chars` characters next to its point: right or left, at the nearest free height. Its
    /// offset from the point.
    pub fn place(&mut self, (x, y): (i32, i32), chars: i32) -> (i32, i32) {
        let width = LABEL_CHAR * chars;
        let heights = (0..40).map(|i| -LABEL_HEIGHT / 2 + (i + 1) / 2 * if i % 2 == 0 { 6 } else { -6 });
        let mut offsets = heights.flat_map(|dy| [(2 * DOT, dy), (-2 * DOT - width, dy)]);
        let rectangle = |(dx, dy): (i32, i32)| (x + dx, y + dy, x + dx + width, y + dy + LABEL_HEIGHT);
        let free = |&offset: &(i32, i32)| {
            let (left, top, right, bottom) = rectangle(offset);
            let inside = left > 0 && right < SIZE.0 as i32 && top > 0 && bottom < SIZE.1 as i32;
            inside && self.0.iter().all(|r| right <= r.0 || r.2 <= left || bottom <= r.1 || r.3 <= top)
        };
        let offset = offsets.find(free).unwrap_or((2 * DOT, -LABEL_HEIGHT / 2));
        self.0.push(rectangle(offset));
        offset
    }
}
