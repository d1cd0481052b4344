//! Many names in one allocation.

/// A list of names, which may be file names and therefore need not be UTF-8. A million names as separate values would
/// take twice the memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Names {
    pub(crate) fn push(&mut self, name: &[u8]) {
        self.bytes.extend_from_slice(name);
        self.ends.push(self.bytes.len());
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied();
        self.bytes.get(start.unwrap_or(0)..end)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).filter_map(|index| self.get(index))
    }
}

impl<N: AsRef<[u8]>> FromIterator<N> for Names {
    fn from_iter<I: IntoIterator<Item = N>>(names: I) -> Self {
        let mut list = Self::default();
        names.into_iter().for_each(|name| list.push(name.as_ref()));
        list.bytes.shrink_to_fit();
        list.ends.shrink_to_fit();
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_by_number() {
        let names: Names = ["b", "", "a/ü"].into_iter().collect();
        assert_eq!(names.iter().collect::<Vec<_>>(), [&b"b"[..], b"", "a/ü".as_bytes()]);
        assert_eq!((names.get(0), names.get(3)), (Some(&b"b"[..]), None));
    }
}
