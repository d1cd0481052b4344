//! Wire format of protocol buffers, as far as events need it.

/// Message that is written field by field.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Appends an `int32`, `int64`, `bool` or enum.
    pub(super) fn varint(mut self, field: u32, value: u64) -> Self {
        self.key(field, 0);
        self.raw(value);
        self
    }

    pub(super) fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Appends a `string` or `bytes`.
    pub(super) fn bytes(mut self, field: u32, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref();
        self.key(field, 2);
        self.raw(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    pub(super) fn message(self, field: u32, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn key(&mut self, field: u32, wire: u64) {
        self.raw(u64::from(field) << 3 | wire);
    }

    /// Appends a base-128 varint: seven bits per byte, the lowest first.
    fn raw(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_those_of_the_encoding_guide() {
        let inner = Message::new().varint(1, 150);
        assert_eq!(inner.0, [0x08, 0x96, 0x01]);
        assert_eq!(Message::new().message(3, &inner).0, [0x1a, 0x03, 0x08, 0x96, 0x01]);
        assert_eq!(Message::new().bytes(2, "testing").0[..3], [0x12, 0x07, b't']);
        assert_eq!(Message::new().float(2, 1.0).0, [0x15, 0, 0, 0x80, 0x3f]);
        assert_eq!(Message::new().double(1, 1.0).0, [0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
        assert_eq!(Message::new().varint(2, u64::MAX).0.len(), 11);
    }
}
