//! Location of a tensor's elements in a file, and reading of regions.

use std::cmp::Reverse;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::Region;

/// Location of a tensor. All its elements are within the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// Offset of the first element in the file.
    pub(crate) begin: u64,
    /// Size of an element in bytes.
    pub(crate) width: u64,
    /// Strides in bytes, one per dimension.
    pub(crate) strides: Vec<u64>,
}

/// A dimension of a region: its size, and its strides in bytes in the file and in memory.
#[derive(Debug, Clone, Copy)]
struct Dim {
    size: u64,
    in_file: u64,
    in_memory: u64,
}

impl Place {
    /// Returns the location of a tensor in row-major order.
    pub(crate) fn row_major(begin: u64, width: u64, shape: &[u64]) -> Self {
        let mut strides: Vec<u64> = shape
            .iter()
            .rev()
            .scan(width, |step, &size| {
                let stride = *step;
                *step = step.saturating_mul(size);
                Some(stride)
            })
            .collect();
        strides.reverse();
        Self { begin, width, strides }
    }

    /// Reads a region of the tensor in row-major order into as many bytes.
    ///
    /// Long runs that are contiguous in the file and in memory are read in place. Short ones with short gaps between
    /// them are copied out of a window of the file.
    pub(crate) fn read(&self, file: &File, region: &Region, into: &mut [u8]) -> io::Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        let starts = region.offset.iter().zip(&self.strides);
        let begin = starts.fold(self.begin, |at, (&index, &stride)| at + index * stride);
        let mut dims = self.dims(region);
        let run = take_run(&mut dims, self.width);
        if run >= LONG_RUN_BYTES {
            return walk(&dims, begin, 0, &mut |at, to| {
                file.read_exact_at(&mut into[to as usize..][..run as usize], at)
            });
        }
        let (outer, block) = Block::of(&dims, run);
        let mut window = Window { file, bytes: Vec::new(), begin: 0 };
        walk(outer, begin, 0, &mut |begin, to| {
            walk(block.dims, begin, to, &mut |at, to| {
                let most = (begin + block.bytes - at).min(block.window);
                let run = window.bytes(at, run as usize, most as usize)?;
                into[to as usize..][..run.len()].copy_from_slice(run);
                Ok(())
            })
        })
    }

    /// Returns the dimensions of a region in the order of the file: the largest strides first.
    fn dims(&self, region: &Region) -> Vec<Dim> {
        let in_memory = Self::row_major(0, self.width, &region.shape).strides;
        let dims = region.shape.iter().zip(&self.strides).zip(in_memory);
        let mut dims: Vec<Dim> = dims
            .map(|((&size, &in_file), in_memory)| Dim { size, in_file, in_memory })
            .filter(|dim| dim.size > 1)
            .collect();
        dims.sort_by_key(|dim| Reverse(dim.in_file));
        dims
    }
}

/// Removes the last dimensions that are contiguous in the file and in memory. Returns the length of a run in bytes.
fn take_run(dims: &mut Vec<Dim>, width: u64) -> u64 {
    let mut run = width;
    while let Some(dim) = dims.pop_if(|dim| dim.in_file == run && dim.in_memory == run) {
        run *= dim.size;
    }
    run
}

/// A range of the file with short runs of a region in it and only short gaps between them.
struct Block<'d> {
    /// Dimensions within the block.
    dims: &'d [Dim],
    bytes: u64,
    /// Number of bytes read at a time.
    window: u64,
}

impl<'d> Block<'d> {
    /// Splits the dimensions into those outside of blocks, and a block.
    fn of(dims: &'d [Dim], run: u64) -> (&'d [Dim], Self) {
        let (mut first, mut bytes, mut in_order) = (dims.len(), run, true);
        for (index, dim) in dims.iter().enumerate().rev() {
            if dim.in_file.saturating_sub(bytes) > LONG_GAP_BYTES {
                break;
            }
            // Otherwise elements along this dimension are between those of the inner dimensions.
            in_order &= dim.in_file >= bytes;
            bytes += (dim.size - 1) * dim.in_file;
            first = index;
        }
        let (outer, dims) = dims.split_at(first);
        // Out of order, the walk returns to earlier bytes: keep all of the block.
        let window = if in_order { WINDOW_BYTES } else { bytes };
        (outer, Self { dims, bytes, window })
    }
}

/// The bytes of a file that were read last.
struct Window<'f> {
    file: &'f File,
    bytes: Vec<u8>,
    begin: u64,
}

impl Window<'_> {
    /// Returns the bytes of a run that begins at `at`. Moves the window there, with `most` bytes, if it does not
    /// contain them.
    fn bytes(&mut self, at: u64, run: usize, most: usize) -> io::Result<&[u8]> {
        let inside = at.checked_sub(self.begin).map(|from| from as usize);
        let from = match inside.filter(|from| from + run <= self.bytes.len()) {
            Some(from) => from,
            None => {
                self.bytes.resize(most, 0);
                self.file.read_exact_at(&mut self.bytes, at)?;
                self.begin = at;
                0
            }
        };
        Ok(&self.bytes[from..from + run])
    }
}

/// Calls `each` with the offsets in the file and in memory of each element of the dimensions.
fn walk(
    dims: &[Dim],
    in_file: u64,
    in_memory: u64,
    each: &mut dyn FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let Some((dim, inner)) = dims.split_first() else { return each(in_file, in_memory) };
    (0..dim.size).try_for_each(|index| {
        walk(inner, in_file + index * dim.in_file, in_memory + index * dim.in_memory, each)
    })
}

/// Minimum run that is read separately: above it, a system call costs less than a copy out of the window.
const LONG_RUN_BYTES: u64 = 64 << 10;
/// Maximum gap that is read along.
const LONG_GAP_BYTES: u64 = 16 << 10;
const WINDOW_BYTES: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn file(bytes: usize) -> (File, Vec<u8>) {
        let content: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251 + i / 65_521) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        (file, content)
    }

    fn bytes_of(region: &Region, width: u64) -> usize {
        (region.shape.iter().product::<u64>() * width) as usize
    }

    /// Copies a region element by element, as the reference.
    fn expected(place: &Place, region: &Region, content: &[u8]) -> Vec<u8> {
        let elements = region.shape.iter().product::<u64>();
        let element = |number: u64| {
            let (mut rest, mut at) = (number, place.begin);
            for dim in (0..region.shape.len()).rev() {
                at += (region.offset[dim] + rest % region.shape[dim]) * place.strides[dim];
                rest /= region.shape[dim];
            }
            &content[at as usize..(at + place.width) as usize]
        };
        (0..elements).flat_map(element).copied().collect()
    }

    fn read(place: &Place, region: &Region, file: &File) -> Vec<u8> {
        let mut into = vec![0; bytes_of(region, place.width)];
        place.read(file, region, &mut into).unwrap();
        into
    }

    /// Generates a tensor's shape, and a region in it.
    fn shape_and_region() -> impl Strategy<Value = (Vec<u64>, Region)> {
        let dim = (1u64..7).prop_flat_map(|size| {
            let start = 0..=size;
            (Just(size), start)
                .prop_flat_map(|(size, start)| (Just(size), Just(start), 0..=size - start))
        });
        proptest::collection::vec(dim, 0..5).prop_map(|dims| {
            let shape = dims.iter().map(|dim| dim.0).collect();
            let region = Region {
                offset: dims.iter().map(|dim| dim.1).collect(),
                shape: dims.iter().map(|dim| dim.2).collect(),
            };
            (shape, region)
        })
    }

    proptest! {
        #[test]
        fn regions_are_what_indexing_says(
            (shape, region) in shape_and_region(), width in prop::sample::select(&[1u64, 2, 4, 8]), begin in 0u64..9
        ) {
            let place = Place::row_major(begin, width, &shape);
            let (file, content) = file(9 + bytes_of(&Region::whole(&shape), width));
            prop_assert_eq!(read(&place, &region, &file), expected(&place, &region, &content));
        }

        /// Checks transposed, strided, expanded and overlapping views.
        #[test]
        fn strides_may_be_any(
            (shape, region) in shape_and_region(), strides in proptest::collection::vec(0u64..40, 5), width in 1u64..5
        ) {
            let strides: Vec<u64> = strides[..shape.len()].to_vec();
            let place = Place { begin: 3, width, strides };
            let (file, content) = file(3 + 5 * 7 * 40 + 5);
            prop_assert_eq!(read(&place, &region, &file), expected(&place, &region, &content));
        }
    }

    #[test]
    fn long_runs_long_gaps_and_moving_windows_are_read() {
        let (file, content) = file(12 << 20);
        for (width, shape, offset, size) in [
            // Rows, and columns of several widths: long runs; short runs with short and with long gaps.
            (4, vec![3, 1 << 17], vec![1, 0], vec![2, 1 << 17]),
            (4, vec![12, 250_000], vec![0, 1000], vec![12, 20_000]),
            (4, vec![3000, 1000], vec![0, 996], vec![3000, 4]),
            (4, vec![100, 30_000], vec![3, 9], vec![90, 5]),
            (2, vec![4, 1000, 1000], vec![1, 10, 20], vec![3, 900, 30]),
            (1, vec![1 << 20], vec![5], vec![(1 << 20) - 5]),
        ] {
            let place = Place::row_major(0, width, &shape);
            let region = Region { offset, shape: size };
            assert!(
                read(&place, &region, &file) == expected(&place, &region, &content),
                "{region}"
            );
        }
        // A transposed matrix, whole and in part, and one that overlaps itself over more than a window.
        for strides in [vec![4, 4000], vec![4, 12_000], vec![4000, 4004]] {
            let place = Place { begin: 8, width: 4, strides };
            let region = Region { offset: vec![3, 10], shape: vec![900, 700] };
            assert!(
                read(&place, &region, &file) == expected(&place, &region, &content),
                "{place:?}"
            );
        }
    }
}
