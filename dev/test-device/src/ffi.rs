//! Declarations of the functions in `cpp/`.

use std::ffi::{CStr, c_char, c_void};

use crate::error::FakeError;

/// Memory statistics of a device, in bytes.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) allocated: u64,
    pub(crate) peak: u64,
    pub(crate) reserved: u64,
    pub(crate) capacity: u64,
}

unsafe extern "C" {
    pub(crate) fn fake_gpu_install(devices: i32) -> *mut c_char;
    pub(crate) fn fake_gpu_random_delays(seed: u64);
    pub(crate) fn fake_gpu_free_text(text: *mut c_char);
    pub(crate) fn fake_gpu_contexts() -> u64;
    pub(crate) fn fake_gpu_listen() -> u64;
    pub(crate) fn fake_gpu_heard(since: u64) -> *mut c_char;
    pub(crate) fn fake_gpu_emulate_kernels(on: bool, count_only: bool);
    pub(crate) fn fake_gpu_set_products(
        times: *const f64,
        count: usize,
        launch: f64,
        part: *const c_char,
        own: f64,
        identity: *const c_char,
    );
    pub(crate) fn fake_gpu_remove_products();
    pub(crate) fn fake_gpu_open_account();
    pub(crate) fn fake_gpu_close_account() -> *mut c_char;
    pub(crate) fn fake_gpu_set_capacity(device: i32, bytes: u64) -> *mut c_char;
    pub(crate) fn fake_gpu_memory(device: i32, memory: *mut Memory) -> *mut c_char;
    pub(crate) fn fake_gpu_empty_cache(device: i32) -> *mut c_char;
    pub(crate) fn fake_gpu_set_device(device: i32) -> *mut c_char;
    pub(crate) fn fake_gpu_new_stream(device: i32, id: *mut i64) -> *mut c_char;
    pub(crate) fn fake_gpu_exchange_stream(device: i32, id: i64, previous: *mut i64)
    -> *mut c_char;
    pub(crate) fn fake_gpu_synchronize_stream(device: i32, id: i64) -> *mut c_char;
    pub(crate) fn fake_gpu_stream_is_drained(device: i32, id: i64) -> bool;
    pub(crate) fn fake_gpu_record_event(
        device: i32,
        id: i64,
        event: *mut *mut c_void,
    ) -> *mut c_char;
    pub(crate) fn fake_gpu_query_event(event: *mut c_void, done: *mut bool) -> *mut c_char;
    pub(crate) fn fake_gpu_wait_event(event: *mut c_void) -> *mut c_char;
    pub(crate) fn fake_gpu_synchronize_event(event: *mut c_void) -> *mut c_char;
    pub(crate) fn fake_gpu_free_event(event: *mut c_void);
    pub(crate) fn fake_gpu_record_stream(
        tensor: *const c_void,
        device: i32,
        id: i64,
    ) -> *mut c_char;
    pub(crate) fn fake_gpu_copy(to: *const c_void, from: *const c_void) -> *mut c_char;
    pub(crate) fn fake_gpu_begin_capture(device: i32) -> *mut c_char;
    pub(crate) fn fake_gpu_end_capture(graph: *mut *mut c_void) -> *mut c_char;
    pub(crate) fn fake_gpu_replay(graph: *mut c_void) -> *mut c_char;
    pub(crate) fn fake_gpu_free_graph(graph: *mut c_void);
    pub(crate) fn fake_gpu_is_capturing(device: i32) -> bool;
    pub(crate) fn fake_gpu_cross_entropy(
        inputs: *const *const c_void,
        losses: *mut c_void,
        classes: i64,
        ignore_index: i64,
        label_smoothing: f64,
        z_loss: f64,
        scale: f64,
    ) -> *mut c_char;
    pub(crate) fn fake_gpu_dropout(
        outputs: *const *mut c_void,
        seed: u64,
        row: u64,
        tiles: i64,
        below: u32,
    ) -> *mut c_char;
    pub(crate) fn fake_gpu_graphs() -> *const c_void;
}

/// Takes ownership of a text from the C++ side; `None` if it is null.
pub(crate) fn text(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: every function of the C++ side that returns text returns what strdup made.
    let owned = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: as above, and nothing else frees it.
    unsafe { fake_gpu_free_text(text) };
    Some(owned)
}

/// Converts the result of a C++ function: null is success, otherwise it is a message.
pub(crate) fn result(message: *mut c_char) -> Result<(), FakeError> {
    text(message).map_or(Ok(()), |message| Err(FakeError { message }))
}
