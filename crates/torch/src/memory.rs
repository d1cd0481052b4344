//! Tensors and slices over the same memory.

use tch::{Kind, Tensor};

use crate::bridge::{Blob, ffi};
use crate::error::Error;

/// A Rust number that libtorch has as an element type.
pub trait Element: sealed::Sealed + Copy + Send + 'static {
    /// libtorch's name for it.
    const KIND: Kind;
}

pub(crate) mod sealed {
    pub trait Sealed {
        /// c10's `ScalarType`.
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

/// A CPU tensor of the given shape that takes over the memory of `data` (row-major), without a copy.
///
/// # Errors
/// [`Error::Misuse`] when the product of `shape` is not the length of `data`.
///
/// ```no_run
/// let t = brigade_torch::from_vec(vec![1f32, 2., 3., 4., 5., 6.], &[2, 3]).unwrap();
/// assert_eq!(t.size(), [2, 3]);
/// assert_eq!(t.double_value(&[1, 0]), 4.0);
/// ```
pub fn from_vec<T: Element>(mut data: Vec<T>, shape: &[i64]) -> Result<Tensor, Error> {
    let elements = shape.iter().try_fold(1usize, |product, &length| {
        usize::try_from(length).ok().and_then(|length| product.checked_mul(length))
    });
    if elements != Some(data.len()) {
        return Err(Error::Misuse(format!(
            "a tensor of shape {shape:?} cannot be made of {} elements",
            data.len()
        )));
    }
    if data.is_empty() {
        // from_blob wants an address, and there is nothing to share.
        return Ok(Tensor::f_empty(shape, (T::KIND, tch::Device::Cpu))?);
    }
    let blob = Box::new(Blob { address: data.as_mut_ptr() as usize, _memory: Box::new(data) });
    // SAFETY: moving the Vec into the box does not move its heap memory, so the address stays valid
    // until libtorch drops the box with the storage's last reference. Nobody on the Rust side can
    // reach the vector any more. The length was checked above and the element type is T's.
    let tensor = unsafe { ffi::tensor_from_blob(blob, shape, T::SCALAR_TYPE) }
        .map_err(|error| Error::libtorch("from_vec", &error))?;
    // SAFETY: a new tensor on the heap, made with the type that tch frees.
    Ok(unsafe { Tensor::from_ptr(tensor.cast()) })
}

/// The elements of a contiguous CPU tensor, in row-major order, without a copy.
///
/// The slice borrows the tensor. In-place operations through another handle of the same storage
/// (`shallow_clone`, a view) must not run while it is held: the type system cannot see those.
///
/// # Errors
/// [`Error::Misuse`] when the element type is another one, or the tensor is on a device, sparse or not
/// contiguous (call `contiguous()` first).
pub fn as_slice<T: Element>(tensor: &Tensor) -> Result<&[T], Error> {
    let kind = tensor.f_kind()?;
    if kind != T::KIND {
        return Err(Error::Misuse(format!("expected a tensor of {:?}, found {kind:?}", T::KIND)));
    }
    let pointer = tensor.as_ptr().cast();
    // SAFETY: the pointer is that of a live tch tensor, for the length of both calls.
    let (plain, address) = unsafe {
        let failed = |error: &cxx::Exception| Error::libtorch("as_slice", error);
        let plain = ffi::tensor_is_plain(pointer).map_err(|e| failed(&e))?;
        (plain, if plain { ffi::tensor_data(pointer).map_err(|e| failed(&e))? } else { 0 })
    };
    if !plain {
        return Err(Error::Misuse(
            "expected a contiguous tensor on the CPU; call to_device(Device::Cpu).contiguous()"
                .into(),
        ));
    }
    let elements = tensor.numel();
    if elements == 0 {
        return Ok(&[]);
    }
    // SAFETY: a contiguous CPU tensor of T's kind holds `elements` initialised values from its data
    // address on (libtorch aligns storages to 64 bytes and offsets by whole elements), and the
    // storage lives as long as the borrowed tensor.
    Ok(unsafe { std::slice::from_raw_parts(address as *const T, elements) })
}

/// The memory of a contiguous CPU tensor of any kind, in row-major order, without a copy: for files.
///
/// As with [`as_slice`], nothing may change the storage through another handle while the bytes are held.
///
/// # Errors
/// [`Error::Misuse`] when the tensor is on a device, sparse or not contiguous.
pub fn as_bytes(tensor: &Tensor) -> Result<&[u8], Error> {
    let (address, bytes) = memory_of("as_bytes", tensor)?;
    if bytes == 0 {
        return Ok(&[]);
    }
    // SAFETY: a contiguous CPU tensor holds that many initialised bytes from its data address on, any
    // byte is a valid u8, and the storage lives as long as the borrowed tensor.
    Ok(unsafe { std::slice::from_raw_parts(address as *const u8, bytes) })
}

/// Lets `fill` write the memory of a contiguous CPU tensor, as a read from a file does, without a copy.
///
/// Autograd does not notice: for leaves and buffers, outside of a forward pass. As with [`as_slice`],
/// nothing may use the storage through another handle meanwhile. The bytes of truth values are brought
/// to 0 and 1 afterwards.
///
/// # Errors
/// [`Error::Misuse`] when the tensor is on a device, sparse or not contiguous; the errors of `fill`.
pub fn fill_bytes<E: From<Error>>(
    tensor: &mut Tensor,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (address, bytes) = memory_of("fill_bytes", tensor)?;
    if bytes == 0 {
        return fill(&mut []);
    }
    // SAFETY: as in `as_bytes`; the tensor is borrowed for the call, and the caller keeps other handles
    // of the storage away.
    let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
    if tensor.f_kind().map_err(Error::from)? != Kind::Bool {
        return fill(memory);
    }
    // C++ knows only two values of bool, and must not see another even if `fill` panics.
    let mut truths = vec![0; bytes];
    fill(&mut truths)?;
    for (to, from) in memory.iter_mut().zip(truths) {
        *to = u8::from(from != 0);
    }
    Ok(())
}

/// Address and size of a contiguous CPU tensor's memory.
fn memory_of(doing: &'static str, tensor: &Tensor) -> Result<(usize, usize), Error> {
    let pointer = tensor.as_ptr().cast();
    // SAFETY: the pointer is that of a live tch tensor, for the length of both calls.
    let (plain, address) = unsafe {
        let failed = |error: &cxx::Exception| Error::libtorch(doing, error);
        let plain = ffi::tensor_is_plain(pointer).map_err(|e| failed(&e))?;
        (plain, if plain { ffi::tensor_data(pointer).map_err(|e| failed(&e))? } else { 0 })
    };
    if !plain {
        return Err(Error::Misuse(format!(
            "{doing}: expected a contiguous tensor on the CPU; call \
             to_device(Device::Cpu).contiguous()"
        )));
    }
    Ok((address, tensor.numel() * tensor.f_kind()?.elt_size_in_bytes()))
}

/// Makes the C library keep the memory that tensors free, for the next tensors.
///
/// A training step allocates and frees the same large tensors again and again. By default glibc gives
/// such memory back to the system each time, and the system clears every page of it anew: on the CNN of
/// the examples that took a quarter of the step. The price is that a process stays as large as it once
/// was. It is a setting of the whole process; the Accelerator makes it. One of the environment
/// (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) wins over it.
pub fn keep_freed_memory() {
    const CHOSEN_BY_USER: [&str; 3] =
        ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];
    let chosen = CHOSEN_BY_USER.iter().any(|name| std::env::var_os(name).is_some());
    if !chosen {
        // A C library without the setting is as fast as it is.
        ffi::keep_freed_memory();
    }
}

/// Gives memory that allocators keep for later back: the C library's to the system, and with `cuda`
/// libtorch's to the GPU. For a new try after memory ran out.
///
/// # Errors
/// [`Error::Libtorch`] when the device refuses.
pub fn release_memory(cuda: bool) -> Result<(), Error> {
    ffi::release_memory(cuda).map_err(|error| Error::libtorch("release_memory", &error))
}
