//! Tensors stored in several parts.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use super::copy;
use crate::dtype::TensorInfo;
use crate::error::Error;
use crate::layout::TensorLocation;
use crate::place::Place;
use crate::pth::StoragePlace;
use crate::region::{Region, RegionCopy};

/// A part of a tensor in a file.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) region: Region,
    pub(crate) location: TensorLocation,
    /// Strides in elements, of a part that is not stored in row-major order, such as that of a transposed or a
    /// channels-last tensor.
    pub(crate) strides: Option<Vec<u64>>,
}

/// Parts in files that cover a tensor exactly once, in any layout.
#[derive(Debug)]
pub(super) struct Chunks {
    info: TensorInfo,
    /// Parts, sorted by their first row.
    parts: Vec<Chunk>,
    /// For each part, the maximum end row of it and the parts before it.
    ends: Vec<u64>,
    /// Storages with checksums that contain the parts, each with its file.
    storages: Vec<(PathBuf, StoragePlace)>,
    /// `true` if the checksums have been compared.
    verified: AtomicBool,
}

impl Chunks {
    /// Joins parts of a tensor in row-major order, given in any order.
    ///
    /// Fails for elements smaller than a byte that are cut along another dimension than the first.
    pub(super) fn new(
        info: TensorInfo,
        parts: Vec<(Region, TensorLocation)>,
    ) -> Result<Self, String> {
        let chunk = |(region, location)| Chunk { region, location, strides: None };
        Self::of_places(info, parts.into_iter().map(chunk).collect())
    }

    /// Joins parts like [`Chunks::new`], each in row-major order or with strides.
    ///
    /// Fails also for elements smaller than a byte that have strides.
    pub(super) fn of_places(info: TensorInfo, mut parts: Vec<Chunk>) -> Result<Self, String> {
        let is_cut = |part: &Chunk| part.region.shape.get(1..) != info.shape.get(1..);
        if is_packed(&info) && parts.iter().any(is_cut) {
            return Err(format!(
                "{info} has elements of {} bits and is cut along another dimension than the first, which cannot be \
                 put together",
                info.dtype.bits()
            ));
        }
        if is_packed(&info) && parts.iter().any(|part| part.strides.is_some()) {
            return Err(format!(
                "{info} has elements of {} bits that are not in row-major order, which cannot be read",
                info.dtype.bits()
            ));
        }
        parts.sort_by(|a, b| a.region.offset.cmp(&b.region.offset));
        let mut last = 0;
        let ends = parts.iter().map(|part| {
            last = last.max(rows(&part.region).1);
            last
        });
        let (storages, verified) = (Vec::new(), AtomicBool::new(false));
        Ok(Self { ends: ends.collect(), parts, info, storages, verified })
    }

    /// Makes the first write compare the checksums of these storages.
    pub(super) fn checked(self, storages: Vec<(PathBuf, StoragePlace)>) -> Self {
        Self { storages, ..self }
    }

    fn verify(&self) -> io::Result<()> {
        if self.verified.load(Ordering::Relaxed) {
            return Ok(());
        }
        for (path, storage) in &self.storages {
            let file =
                File::open(path).map_err(Error::io("read", path)).map_err(io::Error::other)?;
            storage.verify(&file).map_err(|fault| io::Error::other(fault.at(path)))?;
        }
        self.verified.store(true, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn info(&self) -> &TensorInfo {
        &self.info
    }

    /// Writes the elements in row-major order, a piece at a time.
    pub(super) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        self.verify()?;
        // A column of a transposed part is read once for each piece.
        let is_strided = self.parts.iter().any(|part| part.strides.is_some());
        self.write_pieces(out, if is_strided { STRIDED_PIECE_BYTES } else { PIECE_BYTES })
    }

    fn write_pieces(&self, out: &mut dyn Write, piece_bytes: u64) -> io::Result<()> {
        if is_packed(&self.info) {
            return self.parts.iter().try_for_each(|part| copy(&part.location, out));
        }
        let width = self.info.dtype.bytes();
        let mut open: Option<(usize, File)> = None;
        for piece in Region::whole(&self.info.shape).parts(piece_bytes / width) {
            let mut bytes = vec![0; (piece.elements() * width) as usize];
            let (begin, end) = rows(&piece);
            let from = self.ends.partition_point(|&last| last <= begin);
            let to = self.parts.partition_point(|part| rows(&part.region).0 < end);
            for number in from..to {
                let Chunk { region, location, strides } = &self.parts[number];
                let Some(copy) = region.copy_to(&piece) else { continue };
                let unread = |error| io::Error::other(Error::io("read", &location.path)(error));
                let file = match open.take() {
                    Some((last, file)) if self.parts[last].location.path == location.path => file,
                    _ => File::open(&location.path).map_err(unread)?,
                };
                match strides {
                    Some(strides) => {
                        let strides = strides.iter().map(|stride| stride * width).collect();
                        let place = Place { begin: location.offset, width, strides };
                        read_strided(&file, &place, region, &piece, &mut bytes)
                    }
                    None => read(&file, location.offset, &copy, width, &mut bytes),
                }
                .map_err(unread)?;
                open = Some((number, file));
            }
            out.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// Copies the intersection of a part and a piece from the part, which begins at `offset` of the file.
fn read(
    file: &File,
    offset: u64,
    copy: &RegionCopy,
    width: u64,
    piece: &mut [u8],
) -> io::Result<()> {
    let range = |first: u64, len: u64| (first * width) as usize..((first + len) * width) as usize;
    let begin = copy.runs().next().map_or(0, |run| run.source);
    let end = copy.runs().last().map_or(0, |run| run.source + run.len);
    // Reading the gaps takes less time than one system call per run.
    if end - begin <= MOST_READ * copy.elements() {
        let mut span = vec![0; ((end - begin) * width) as usize];
        file.read_exact_at(&mut span, offset + begin * width)?;
        for run in copy.runs() {
            let source = &span[range(run.source - begin, run.len)];
            piece[range(run.target, run.len)].copy_from_slice(source);
        }
        return Ok(());
    }
    copy.runs().try_for_each(|run| {
        file.read_exact_at(&mut piece[range(run.target, run.len)], offset + run.source * width)
    })
}

/// Copies the intersection of a part and a piece from a part whose elements are in another order.
fn read_strided(
    file: &File,
    place: &Place,
    part: &Region,
    piece: &Region,
    into: &mut [u8],
) -> io::Result<()> {
    let Some(common) = part.intersection(piece) else { return Ok(()) };
    let width = place.width;
    let mut bytes = vec![0; (common.elements() * width) as usize];
    let offset = common.offset.iter().zip(&part.offset).map(|(own, first)| own - first).collect();
    let inside = Region { offset, shape: common.shape.clone() };
    place.read(file, &inside, &mut bytes)?;
    let range = |first: u64, len: u64| (first * width) as usize..((first + len) * width) as usize;
    for run in common.copy_to(piece).iter().flat_map(RegionCopy::runs) {
        into[range(run.target, run.len)].copy_from_slice(&bytes[range(run.source, run.len)]);
    }
    Ok(())
}

/// Returns `true` if elements are not aligned to bytes.
fn is_packed(info: &TensorInfo) -> bool {
    !info.dtype.bits().is_multiple_of(8)
}

/// Returns the range of rows as first row and end.
fn rows(region: &Region) -> (u64, u64) {
    match (region.offset.first(), region.shape.first()) {
        (Some(&first), Some(&count)) => (first, first.saturating_add(count)),
        _ => (0, 1),
    }
}

const PIECE_BYTES: u64 = 1 << 20;
const STRIDED_PIECE_BYTES: u64 = 16 << 20;
/// Maximum number of elements to read per element used.
const MOST_READ: u64 = 4;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::Dtype;

    proptest! {
        /// Checks numbers from 0 on, cut along any dimensions and stored part after part, some of them transposed.
        #[test]
        fn parts_of_any_cut_are_the_whole(
            shape in proptest::collection::vec(0u64..7, 1..4),
            cuts in proptest::collection::vec((0usize..4, 1u64..4), 0..4),
            piece_bytes in 1u64..300,
            transposed in any::<u64>(),
        ) {
            let regions = cuts.iter().fold(vec![Region::whole(&shape)], |parts, (dim, ranks)| {
                let cut = |part: Region| (0..*ranks).map(move |place| part.chunk(dim % part.shape.len(), *ranks, place));
                parts.into_iter().flat_map(cut).collect()
            });
            let whole = Region::whole(&shape);
            let numbers: Vec<u32> = (0..whole.elements() as u32).collect();
            let mut file = tempfile::NamedTempFile::new().unwrap();
            let (mut parts, mut offset) = (Vec::new(), 0);
            let regions = regions.into_iter().rev().filter(|region| region.elements() > 0);
            for (number, region) in regions.enumerate() {
                let mut values = vec![0u32; region.elements() as usize];
                for run in whole.copy_to(&region).unwrap().runs() {
                    let range = |first: u64| first as usize..(first + run.len) as usize;
                    values[range(run.target)].copy_from_slice(&numbers[range(run.source)]);
                }
                let is_transposed = transposed >> (number % 64) & 1 == 1;
                let strides = is_transposed.then(|| {
                    // Column-major order: the first dimension has stride 1.
                    let stride = |dim: usize| region.shape[..dim].iter().product::<u64>();
                    let strides: Vec<u64> = (0..region.shape.len()).map(stride).collect();
                    let mut columns = vec![0u32; values.len()];
                    for (element, value) in values.iter().enumerate() {
                        let (mut rest, mut place) = (element as u64, 0);
                        for dim in (0..strides.len()).rev() {
                            place += rest % region.shape[dim] * strides[dim];
                            rest /= region.shape[dim];
                        }
                        columns[place as usize] = *value;
                    }
                    values = columns;
                    strides
                });
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                file.write_all(&bytes).unwrap();
                let info = TensorInfo { dtype: Dtype::U32, shape: region.shape.clone() };
                let location = TensorLocation { path: file.path().to_owned(), offset, info };
                parts.push(Chunk { region, location, strides });
                offset += bytes.len() as u64;
            }
            let info = TensorInfo { dtype: Dtype::U32, shape };
            let mut found = Vec::new();
            Chunks::of_places(info, parts).unwrap().write_pieces(&mut found, piece_bytes).unwrap();
            let expected: Vec<u8> = numbers.iter().flat_map(|value| value.to_le_bytes()).collect();
            prop_assert!(found == expected, "{} bytes of {}", found.len(), expected.len());
        }
    }

    #[test]
    fn rows_of_elements_of_less_than_a_byte_are_joined_and_columns_refused() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[3, 4, 1, 2]).unwrap();
        let info = |shape: &[u64]| TensorInfo { dtype: Dtype::F4, shape: shape.to_vec() };
        let part = |region: Region, offset: u64| {
            let place =
                TensorLocation { path: file.path().to_owned(), offset, info: info(&region.shape) };
            (region, place)
        };
        let whole = Region::whole(&[2, 4]);
        let rows = vec![part(whole.narrow(0, 1, 1), 0), part(whole.narrow(0, 0, 1), 2)];
        let mut found = Vec::new();
        Chunks::new(info(&[2, 4]), rows).unwrap().write_to(&mut found).unwrap();
        assert_eq!(found, [1, 2, 3, 4]);
        let columns = vec![part(whole.narrow(1, 0, 2), 0), part(whole.narrow(1, 2, 2), 2)];
        let error = Chunks::new(info(&[2, 4]), columns).unwrap_err();
        assert!(error.contains("elements of 4 bits"), "{error}");
    }
}
