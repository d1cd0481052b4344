//! Tensors and slices over the same memory.

use std::marker::PhantomData;
use std::ops::Range;
use std::{fmt, ptr};

use tch::{Kind, Tensor};

use crate::bridge::{Blob, borrow, ffi, own};
use crate::error::Error;

/// A Rust number type that libtorch has as an element type.
pub trait Element: sealed::Sealed + Copy + Send + 'static {
    /// Kind of the element type in libtorch.
    const KIND: Kind;
}

pub(crate) mod sealed {
    pub trait Sealed {
        /// Number of the element type in c10's `ScalarType`.
        const SCALAR_TYPE: i8;
    }
}

macro_rules! elements {
    ($($rust:ty => $kind:ident = $number:literal),+ $(,)?) => {$(
        impl sealed::Sealed for $rust {
            const SCALAR_TYPE: i8 = $number;
        }
        impl Element for $rust {
            const KIND: Kind = Kind::$kind;
        }
    )+};
}

elements! {
    u8 => Uint8 = 0,
    i8 => Int8 = 1,
    i16 => Int16 = 2,
    i32 => Int = 3,
    i64 => Int64 = 4,
    f32 => Float = 6,
    f64 => Double = 7,
}

/// Creates a CPU tensor of the given shape that takes over the memory of `data` (row-major), without a copy.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] when the product of `shape` is not the length of `data`.
///
/// ```
/// let t = brigade_torch::from_vec(vec![1f32, 2., 3., 4., 5., 6.], &[2, 3]).unwrap();
/// assert_eq!(t.size(), [2, 3]);
/// assert_eq!(t.double_value(&[1, 0]), 4.0);
/// ```
pub fn from_vec<T: Element>(mut data: Vec<T>, shape: &[i64]) -> Result<Tensor, Error> {
    let elements = shape.iter().try_fold(1usize, |product, &length| {
        usize::try_from(length).ok().and_then(|length| product.checked_mul(length))
    });
    if elements != Some(data.len()) {
        return Err(Error::invalid_argument(format!(
            "a tensor of shape {shape:?} cannot be made of {} elements",
            data.len()
        )));
    }
    if data.is_empty() {
        // from_blob needs an address, and there are no elements to share.
        return Ok(Tensor::f_empty(shape, (T::KIND, tch::Device::Cpu))?);
    }
    let blob = Box::new(Blob { address: data.as_mut_ptr() as usize, _memory: Box::new(data) });
    // SAFETY: moving the Vec into the box does not move its heap memory, so the address stays valid
    // until libtorch drops the box with the storage's last reference. Nothing on the Rust side can
    // reach the vector any more. The length was checked above and the element type is T's.
    let tensor = unsafe { ffi::tensor_from_blob(blob, shape, T::SCALAR_TYPE) }
        .map_err(|error| Error::libtorch("from_vec", &error))?;
    Ok(own(tensor))
}

/// A view of the elements of a contiguous CPU tensor, in row-major order, from which they can be copied.
///
/// It never returns a reference to the tensor's memory, and stores no address of it, because other handles of the same
/// tensor (`shallow_clone`) may write to it, resize the tensor or replace its memory (`set_data`) at any time, which
/// the type system does not prevent. Each call copies the tensor's present values.
pub struct Elements<'a, T> {
    tensor: &'a Tensor,
    element: PhantomData<T>,
}

/// Returns a view of the elements of a contiguous CPU tensor, from which all or some can be copied.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] when the element type is not that of the tensor, or the tensor is on a device,
/// sparse or not contiguous (call `contiguous()` first).
///
/// ```
/// use brigade_torch::elements;
/// use tch::Tensor;
/// let tensor = Tensor::from_slice(&[1f32, 2.0, 3.0]);
/// assert_eq!(elements::<f32>(&tensor)?.to_vec(), [1.0, 2.0, 3.0]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub fn elements<T: Element>(tensor: &Tensor) -> Result<Elements<'_, T>, Error> {
    let kind = tensor.f_kind()?;
    if kind != T::KIND {
        return Err(Error::invalid_argument(format!(
            "expected a tensor of {:?}, found {kind:?}",
            T::KIND
        )));
    }
    memory_of("elements", tensor)?;
    Ok(Elements { tensor, element: PhantomData })
}

/// Returns a view of the bytes of a contiguous CPU tensor of any kind, for writing them to files.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] when the tensor is on a device, sparse or not contiguous.
pub fn bytes(tensor: &Tensor) -> Result<Elements<'_, u8>, Error> {
    memory_of("bytes", tensor)?;
    Ok(Elements { tensor, element: PhantomData })
}

impl<T: Element> Elements<'_, T> {
    /// Returns the number of elements that the tensor has now: 0 once it is not a contiguous CPU tensor any more.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory().1
    }

    /// Returns `true` if the tensor has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies all elements into a vector.
    #[must_use]
    pub fn to_vec(&self) -> Vec<T> {
        let mut out = Vec::new();
        self.append(0..self.len(), &mut out);
        out
    }

    /// Appends the elements of `range` to a vector.
    ///
    /// # Panics
    /// Panics if the range is not within [`Elements::len`], like a slice.
    pub fn append(&self, range: Range<usize>, out: &mut Vec<T>) {
        let from = self.checked(&range);
        let count = range.len();
        out.reserve(count);
        // SAFETY: `reserve` made room for `count` elements behind the vector's last; the source holds them now
        // (`checked`), and nothing here changes the tensor. A new allocation cannot overlap a tensor that lives. Copied
        // as bytes, since a tensor over foreign memory may lie at any address; any bytes that libtorch has written are
        // a valid T, which is a plain number.
        unsafe {
            let to = out.as_mut_ptr().add(out.len()).cast::<u8>();
            ptr::copy_nonoverlapping(from, to, count * size_of::<T>());
            out.set_len(out.len() + count);
        }
    }

    /// Copies the elements of `range` into a slice of the same length.
    ///
    /// # Panics
    /// Panics if the range is not within [`Elements::len`], or if the lengths of `out` and the range differ.
    pub fn copy_to(&self, range: Range<usize>, out: &mut [T]) {
        let from = self.checked(&range);
        let count = range.len();
        assert_eq!(count, out.len(), "a slice of {} for {count} elements", out.len());
        // SAFETY: as in `append`; the slice is exclusively borrowed Rust memory. `ptr::copy`, since a
        // tensor made by `from_blob` in other code may lie over it.
        unsafe { ptr::copy(from, out.as_mut_ptr().cast::<u8>(), count * size_of::<T>()) };
    }

    /// Calls `use_chunk` with all elements, at most `most` at a time, which are copied to one buffer. If `use_chunk`
    /// resizes the tensor through another handle, the iteration ends at the tensor's new end.
    ///
    /// # Errors
    /// Returns the first error of `use_chunk`.
    pub fn try_chunks<E>(
        &self,
        most: usize,
        mut use_chunk: impl FnMut(&[T]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = Vec::with_capacity(self.len().min(most));
        let mut done = 0;
        loop {
            let len = self.len();
            if done >= len {
                return Ok(());
            }
            let next = len.min(done.saturating_add(most.max(1)));
            buffer.clear();
            self.append(done..next, &mut buffer);
            use_chunk(&buffer)?;
            done = next;
        }
    }

    /// Returns the address of the first byte of `range`.
    fn checked(&self, range: &Range<usize>) -> *const u8 {
        let (address, len) = self.memory();
        assert!(range.start <= range.end && range.end <= len, "elements {range:?} of {len}");
        (address as *const u8).wrapping_add(range.start * size_of::<T>())
    }

    /// Returns the address and the number of the elements that the tensor holds now. The number follows from its bytes,
    /// even if its kind has changed.
    fn memory(&self) -> (usize, usize) {
        let (address, bytes) = memory_of("elements", self.tensor).unwrap_or((0, 0));
        (address, bytes / size_of::<T>())
    }
}

impl<T> fmt::Debug for Elements<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Elements").field("tensor", self.tensor).finish_non_exhaustive()
    }
}

/// Lets `fill` write the memory of a contiguous CPU tensor, as a read from a file does, without a copy.
///
/// Autograd does not record the change: use it for leaves and buffers, outside of a forward pass. It is not public
/// because `fill` must not use the storage through another handle. The bytes of Boolean values are set to 0 or 1
/// afterwards.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] when the tensor is on a device, sparse or not contiguous; the errors of
/// `fill`.
pub(crate) fn fill_bytes<E: From<Error>>(
    tensor: &mut Tensor,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (_, bytes) = memory_of("fill_bytes", tensor)?;
    if bytes == 0 {
        return fill(&mut []);
    }
    let address = ffi::tensor_mutable_data(borrow(tensor))
        .map_err(|error| Error::libtorch("fill_bytes", &error))?;
    // SAFETY: a contiguous CPU tensor holds that many initialised bytes; the tensor is borrowed for the
    // call, and `fill`, of this crate, reads a file (`brigade-checkpoint` knows no tensors) and uses no tensor.
    let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
    if tensor.f_kind().map_err(Error::from)? != Kind::Bool {
        return fill(memory);
    }
    // A bool has only two valid values in C++, and must not get another one even if `fill` panics.
    let mut truths = vec![0; bytes];
    fill(&mut truths)?;
    for (to, from) in memory.iter_mut().zip(truths) {
        *to = u8::from(from != 0);
    }
    Ok(())
}

/// Returns the address and size of a contiguous CPU tensor's memory.
fn memory_of(doing: &'static str, tensor: &Tensor) -> Result<(usize, usize), Error> {
    let failed = |error: cxx::Exception| Error::libtorch(doing, &error);
    if !ffi::tensor_is_plain(borrow(tensor)).map_err(failed)? {
        return Err(Error::invalid_argument(format!(
            "{doing}: expected a contiguous tensor on the CPU; call \
             to_device(Device::Cpu).contiguous()"
        )));
    }
    let address = ffi::tensor_data(borrow(tensor)).map_err(failed)?;
    Ok((address, tensor.numel() * tensor.f_kind()?.elt_size_in_bytes()))
}

/// Makes the process keep the CPU memory that tensors free, for the next tensors.
///
/// A training step allocates and frees the same large tensors again and again. By default glibc gives such memory back
/// to the system each time, and the system clears every page of it again: on the CNN of the examples that took a
/// quarter of the step. The disadvantage is that the memory of a process does not shrink; [`release_memory`] frees
/// unused memory.
///
/// It is a setting of the whole process, which the Accelerator makes by default. On Linux, libtorch's allocator of CPU
/// tensors is replaced: tensors of 1 MB and more are in one address range of the machine's memory size, with huge pages
/// if the kernel supports them (not under `ulimit -v`, nor with strict overcommit accounting). glibc's `malloc` is
/// configured not to return freed memory to the system (`M_TRIM_THRESHOLD`, `M_MMAP_THRESHOLD`), and huge pages are
/// requested for 64 MB of its heap. `BRIGADE_KEEP_MEMORY=0` leaves everything as it is, and so does a setting of the C
/// library in the environment (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`).
///
/// A process that is forked without `exec` afterwards must not use tensors: its first allocation ends the process with
/// a message, because another thread may have held the allocator's lock.
pub fn keep_freed_memory() {
    const CHOSEN_BY_USER: [&str; 3] =
        ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];
    let chosen = CHOSEN_BY_USER.iter().any(|name| std::env::var_os(name).is_some());
    let off = std::env::var("BRIGADE_KEEP_MEMORY").is_ok_and(|value| {
        ["0", "false", "off", "no"].contains(&value.trim().to_ascii_lowercase().as_str())
    });
    if !chosen && !off {
        // Does nothing with a C library that does not have the setting.
        ffi::keep_freed_memory();
    }
}

/// Returns memory that allocators keep for reuse: that of the C library to the system, and with `cuda` that of libtorch
/// to the GPU. For a new attempt after memory ran out.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] if the device fails.
pub fn release_memory(cuda: bool) -> Result<(), Error> {
    ffi::release_memory(cuda).map_err(|error| Error::libtorch("release_memory", &error))
}

/// Makes every CPU tensor that is allocated from now on begin `bytes` after a multiple of 64, in the whole process: for
/// tests that results do not depend on the alignment of tensors.
///
/// # Errors
/// [`crate::TorchError::Libtorch`] unless `bytes` is a multiple of 4 below 64.
#[doc(hidden)]
pub fn shift_allocations(bytes: usize) -> Result<(), Error> {
    ffi::shift_allocations(bytes).map_err(|error| Error::libtorch("shift_allocations", &error))
}
