//! Reading of damaged JPEG files with the same result as libjpeg, which reads them with a warning.
//!
//! The decoder of the crate libjpeg-turbo-rs rejects a wrong Huffman code or sets its block to grey. libjpeg, and
//! therefore Pillow, takes the code for a zero and continues with the next bit, so that other pixels result. Here the
//! coefficients are read by libjpeg's rules (`jdhuff.c`, `jdphuff.c`, `jdmarker.c`), and written as an undamaged file
//! that the decoder accepts. A file that ends within its data remains an error, as in Pillow.
//!
//! This is slow, bit by bit, and only used for files that the decoder has rejected or that have no end marker.

mod progressive;
mod write;

use self::progressive::Pass;

/// Returns `true` if a file is progressive and has, from its first scan on, no markers but those of scans and their
/// tables. Bytes of a table may be mistaken for another marker.
pub(super) fn is_progressive_with_known_markers(bytes: &[u8]) -> bool {
    let find = |kind: u8| bytes.windows(2).position(|pair| pair == [0xFF, kind]);
    let (Some(frame), Some(start)) = (find(0xC2), find(SOS)) else { return false };
    let known = |pair: &[u8]| match *pair {
        [0xFF, 0 | 0xC4 | RST0..=EOI | SOS | 0xDB | DRI | 0xE0..=0xEF | 0xFE | 0xFF] => true,
        [first, _] => first != 0xFF,
        _ => true,
    };
    frame < start && bytes.get(start..).unwrap_or_default().windows(2).all(known)
}

/// An undamaged file, and libjpeg's warning for the file from which it was made.
pub(super) struct Repaired {
    pub(super) jpeg: Vec<u8>,
    pub(super) warning: Option<String>,
}

/// Reads a Huffman-coded file that the decoder rejects. Returns `None` for a file that libjpeg does not read either,
/// and for arithmetic coding.
pub(super) fn repair(bytes: &[u8]) -> Option<Repaired> {
    let mut file = File::new(bytes);
    file.read()?;
    let frame = file.frame.as_ref()?;
    // libjpeg estimates the coefficients that scans would have refined, and does so differently if the last scan ends
    // early.
    if file.insufficient && frame.is_smoothed() {
        return None;
    }
    let jpeg = write::write(frame, &file.headers)?;
    Some(Repaired { jpeg, warning: file.warning.map(str::to_owned) })
}

/// Returns `true` if a file has its end marker, or, without it, all data that libjpeg reads up to the last block.
/// Pillow treats other files as cut short.
pub(super) fn is_whole(bytes: &[u8]) -> bool {
    bytes.ends_with(&[0xFF, EOI])
        || has_end(bytes).unwrap_or(false)
        || File::new(bytes).read().is_some()
}

/// Returns `true` if an end marker comes after the first scan; `None` if the file ends before that is known.
fn has_end(bytes: &[u8]) -> Option<bool> {
    let (mut at, mut is_scanned) = (2, false);
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xFF)? + 1;
        match *bytes.get(at)? {
            EOI if is_scanned => return Some(true),
            // Coded data, and markers without a segment.
            0 | 0xFF | 0x01 | RST0..=EOI => continue,
            kind => is_scanned |= kind == SOS,
        }
        let &[high, low] = bytes.get(at + 1..at + 3)? else { return None };
        at += 1 + usize::from(u16::from_be_bytes([high, low]));
    }
}

const SOI: u8 = 0xD8;
const EOI: u8 = 0xD9;
const SOS: u8 = 0xDA;
const DRI: u8 = 0xDD;
const RST0: u8 = 0xD0;

/// Positions in a block of the coefficients in coding order (zigzag). Codes may exceed the end by 15 positions.
const NATURAL: [usize; 80] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20,
    13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59,
    52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63,
];

struct Frame {
    is_progressive: bool,
    width: u16,
    height: u16,
    components: Vec<Component>,
}

struct Component {
    id: u8,
    horizontal: usize,
    vertical: usize,
    table: usize,
    /// Quantization table in coding order, at the time when the component's first scan began.
    quantization: Option<[u16; 64]>,
    /// Number of blocks across and down that contain pixels, and number across with those that complete the last unit.
    across: usize,
    down: usize,
    stride: usize,
    blocks: Vec<[i16; 64]>,
    /// Number of low bits of each coefficient, in coding order, that no scan has contained; -1 before the first one.
    unknown: [i8; 64],
}

impl Frame {
    /// Returns `true` if libjpeg smooths blocks: if scans have contained all DC coefficients, but not all bits of the
    /// nine coefficients next to them.
    fn is_smoothed(&self) -> bool {
        self.is_progressive
            && self.components.iter().all(|component| component.unknown[0] >= 0)
            && self.components.iter().any(|component| component.unknown[1..10] != [0; 9])
    }
}

struct Table {
    /// The largest code of each length, -1 if there is none. Longer codes end at index 17.
    largest: [i32; 18],
    offset: [i32; 17],
    symbols: Vec<u8>,
}

impl Table {
    fn new(counts: &[u8], symbols: &[u8]) -> Option<Self> {
        let (mut largest, mut offset) = ([-1; 18], [0; 17]);
        let (mut code, mut used) = (0_i32, 0_i32);
        for (length, count) in (1..).zip(counts) {
            let count = i32::from(*count);
            if count > 0 {
                offset[length] = used - code;
                used += count;
                code += count;
                largest[length] = code - 1;
            }
            if code > 1 << length {
                return None;
            }
            code <<= 1;
        }
        largest[17] = i32::MAX;
        (usize::try_from(used).ok()? == symbols.len()).then(|| Self {
            largest,
            offset,
            symbols: symbols.to_vec(),
        })
    }
}

/// Reader of a file.
struct File<'a> {
    bytes: &'a [u8],
    at: usize,
    /// A marker that was found in coded data.
    marker: Option<u8>,
    buffer: u64,
    left: u32,
    /// `true` if coded data have ended before the last block: zeros follow up to a restart.
    insufficient: bool,
    warning: Option<&'static str>,
    quantization: [Option<[u16; 64]>; 4],
    direct: [Option<Table>; 4],
    alternating: [Option<Table>; 4],
    restart_interval: u32,
    next_restart: u8,
    scans: usize,
    /// Number of blocks of the band that end here, for which nothing more is coded.
    ended_blocks: u32,
    frame: Option<Frame>,
    /// Segments that contain the colour space and the orientation.
    headers: Vec<u8>,
}

impl<'a> File<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            marker: None,
            buffer: 0,
            left: 0,
            insufficient: false,
            warning: None,
            quantization: [None; 4],
            direct: [const { None }; 4],
            alternating: [const { None }; 4],
            restart_interval: 0,
            next_restart: 0,
            scans: 0,
            ended_blocks: 0,
            frame: None,
            headers: Vec::new(),
        }
    }

    fn warn(&mut self, warning: &'static str) {
        self.warning.get_or_insert(warning);
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    /// Advances to the next marker.
    fn next_marker(&mut self) -> Option<u8> {
        loop {
            while self.byte()? != 0xFF {
                self.warn("extraneous bytes before a marker");
            }
            let mut kind = self.byte()?;
            while kind == 0xFF {
                kind = self.byte()?;
            }
            if kind != 0 {
                return Some(kind);
            }
            self.warn("extraneous bytes before a marker");
        }
    }

    fn segment(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.byte()?) << 8 | usize::from(self.byte()?);
        let body = self.bytes.get(self.at..self.at + length.checked_sub(2)?)?;
        self.at += body.len();
        Some(body)
    }

    /// Reads all scans up to the end marker. The marker may be missing if one scan had all components, but all existing
    /// data must be valid.
    fn read(&mut self) -> Option<()> {
        if self.bytes.get(..2) != Some(&[0xFF, SOI]) {
            return None;
        }
        self.at = 2;
        let mut is_whole = false;
        loop {
            let marker = self.marker.take();
            let Some(kind) = marker.or_else(|| self.next_marker()) else {
                return is_whole.then_some(());
            };
            match kind {
                // A file has at least one scan.
                EOI => {
                    let frame = self.frame.as_ref()?;
                    let scanned = frame.components.iter().any(|it| it.quantization.is_some());
                    return scanned.then_some(());
                }
                // Restart markers out of place.
                0x01 | RST0..=0xD7 => continue,
                SOI | 0x02..=0xBF | 0xC8 | 0xDE | 0xDF | 0xF0..=0xFD => return None,
                _ => {}
            }
            let start = self.at - 2;
            // The length of this segment is checked before its bytes are available.
            if kind == DRI && self.bytes.get(self.at..self.at + 2).is_some_and(|it| it != [0, 4]) {
                return None;
            }
            let Some(body) = self.segment() else { return is_whole.then_some(()) };
            match kind {
                SOS if is_whole => return None,
                0xC0..=0xC2 => self.start_frame(body, kind == 0xC2)?,
                0xC3..=0xCF if !matches!(kind, 0xC4 | 0xC8 | 0xCC) => return None,
                0xC4 => self.huffman_tables(body)?,
                0xDB => self.quantization_tables(body)?,
                DRI => self.restart_interval = u32::from(u16::from_be_bytes(body.try_into().ok()?)),
                0xE0 | 0xE1 | 0xEE => {
                    self.headers.extend([0xFF, kind]);
                    self.headers.extend(self.bytes.get(start + 2..self.at)?);
                }
                SOS => is_whole = self.scan(body)?,
                _ => {}
            }
        }
    }

    fn start_frame(&mut self, body: &[u8], is_progressive: bool) -> Option<()> {
        let &[8, high, low, wide, narrow, count, ref rest @ ..] = body else { return None };
        let (height, width) = (u16::from_be_bytes([high, low]), u16::from_be_bytes([wide, narrow]));
        let is_second = self.frame.is_some();
        let count = usize::from(count);
        if is_second
            || width == 0
            || height == 0
            || !(1..=4).contains(&count)
            || rest.len() != 3 * count
        {
            return None;
        }
        let factors = |sampling: u8| (usize::from(sampling >> 4), usize::from(sampling & 15));
        let sampled = rest.as_chunks::<3>().0;
        let largest = |factor: fn((usize, usize)) -> usize| {
            sampled.iter().map(|&[_, sampling, _]| factor(factors(sampling))).max()
        };
        let (most_across, most_down) = (largest(|it| it.0)?, largest(|it| it.1)?);
        let mut components = Vec::new();
        for &[id, sampling, table] in sampled {
            let (horizontal, vertical) = factors(sampling);
            if !(1..=4).contains(&horizontal) || !(1..=4).contains(&vertical) || table > 3 {
                return None;
            }
            let blocks = |side: u16, factor: usize, most: usize| {
                (usize::from(side) * factor).div_ceil(8 * most)
            };
            let units = |side: u16, most: usize| usize::from(side).div_ceil(8 * most);
            let stride = units(width, most_across) * horizontal;
            let all = stride.checked_mul(units(height, most_down) * vertical)?;
            // At least one bit is coded for each block.
            if all > 8 * self.bytes.len() {
                return None;
            }
            let mut memory = Vec::new();
            memory.try_reserve_exact(all).ok()?;
            memory.resize(all, [0; 64]);
            components.push(Component {
                id,
                horizontal,
                vertical,
                table: table.into(),
                quantization: None,
                across: blocks(width, horizontal, most_across),
                down: blocks(height, vertical, most_down),
                stride,
                blocks: memory,
                unknown: [-1; 64],
            });
        }
        self.frame = Some(Frame { is_progressive, width, height, components });
        Some(())
    }

    fn huffman_tables(&mut self, mut body: &[u8]) -> Option<()> {
        while let [kind, rest @ ..] = body {
            let counts = rest.get(..16)?;
            let length: usize = counts.iter().map(|count| usize::from(*count)).sum();
            let symbols = rest.get(16..16 + length)?;
            let table = Table::new(counts, symbols);
            let tables = match kind >> 4 {
                0 if symbols.iter().all(|category| *category < 16) => &mut self.direct,
                1 => &mut self.alternating,
                _ => return None,
            };
            *tables.get_mut(usize::from(kind & 15))? = Some(table?);
            body = rest.get(16 + length..)?;
        }
        Some(())
    }

    fn quantization_tables(&mut self, mut body: &[u8]) -> Option<()> {
        while let [kind, rest @ ..] = body {
            let width = if kind >> 4 == 0 { 1 } else { 2 };
            let values = rest.get(..64 * width)?;
            let mut table = [0; 64];
            for (to, from) in table.iter_mut().zip(values.chunks_exact(width)) {
                *to = from.iter().fold(0, |sum, byte| sum << 8 | u16::from(*byte));
            }
            *self.quantization.get_mut(usize::from(kind & 15))? = Some(table);
            body = rest.get(64 * width..)?;
        }
        Some(())
    }

    /// Reads a scan. Returns `true` if it was the only one, with all components.
    fn scan(&mut self, body: &[u8]) -> Option<bool> {
        self.scans += 1;
        if self.scans > super::MAX_SCANS {
            return None;
        }
        let mut frame = self.frame.take()?;
        let (&count, rest) = body.split_first()?;
        let (selected, parameters) = rest.split_at_checked(2 * usize::from(count))?;
        let selected = selected.as_chunks::<2>().0;
        let mut members = Vec::new();
        for &[id, tables] in selected {
            let number = frame.components.iter().position(|component| component.id == id)?;
            let component = frame.components.get_mut(number)?;
            if component.quantization.is_none() {
                component.quantization = *self.quantization.get(component.table)?;
            }
            component.quantization?;
            members.push((number, usize::from(tables >> 4), usize::from(tables & 15)));
        }
        let pass =
            if frame.is_progressive { Some(Pass::new(parameters, members.len())?) } else { None };
        if let Some(pass) = &pass {
            for (number, ..) in &members {
                if !pass.follows(&mut frame.components.get_mut(*number)?.unknown)? {
                    self.warn("scans out of order");
                }
            }
        }
        let whole = !frame.is_progressive && members.len() == frame.components.len();
        let alone = members.len() == 1;
        let (across, down) = match members.first() {
            Some((number, ..)) if alone => {
                let component = frame.components.get(*number)?;
                (component.across, component.down)
            }
            Some((number, ..)) => {
                let component = frame.components.get(*number)?;
                let rows = component.blocks.len() / component.stride.max(1);
                (component.stride / component.horizontal, rows / component.vertical)
            }
            None => return None,
        };
        (self.buffer, self.left, self.insufficient, self.next_restart) = (0, 0, false, 0);
        self.ended_blocks = 0;
        let mut before = [0_i32; 4];
        let mut to_go = self.restart_interval;
        for unit in 0..across * down {
            if self.restart_interval > 0 {
                if to_go == 0 {
                    self.restart()?;
                    before = [0; 4];
                    self.ended_blocks = 0;
                    to_go = self.restart_interval;
                }
                to_go -= 1;
            }
            if self.insufficient {
                continue;
            }
            let (x, y) = (unit % across, unit / across);
            for (number, direct, alternating) in &members {
                let component = frame.components.get_mut(*number)?;
                let (h, v) =
                    if alone { (1, 1) } else { (component.horizontal, component.vertical) };
                for place in 0..h * v {
                    let (column, row) = (x * h + place % h, y * v + place / h);
                    let block = component.blocks.get_mut(row * component.stride + column)?;
                    let before = before.get_mut(*number)?;
                    match &pass {
                        None => self.block(block, *direct, *alternating, before)?,
                        Some(pass) => self.band(pass, block, *direct, *alternating, before)?,
                    }
                }
            }
        }
        self.frame = Some(frame);
        Some(whole)
    }

    fn block(
        &mut self,
        block: &mut [i16; 64],
        direct: usize,
        alternating: usize,
        before: &mut i32,
    ) -> Option<()> {
        let category = self.symbol(direct, false)?;
        let difference = self.value(category.into())?;
        *before = before.wrapping_add(difference);
        block[0] = *before as i16;
        let mut at = 1;
        while at < 64 {
            let symbol = self.symbol(alternating, true)?;
            let (run, category) = (usize::from(symbol >> 4), u32::from(symbol & 15));
            if category > 0 {
                at += run;
                let value = self.value(category)?;
                *block.get_mut(*NATURAL.get(at)?)? = value as i16;
            } else if run == 15 {
                at += 15;
            } else {
                break;
            }
            at += 1;
        }
        Some(())
    }

    /// Reads a Huffman code. A wrong code counts as a zero.
    fn symbol(&mut self, table: usize, alternating: bool) -> Option<u8> {
        if self.left < 8 {
            self.fill(0)?;
        }
        let mut code = 0;
        let mut length = 0;
        loop {
            code = code << 1 | self.bits(1)? as i32;
            length += 1;
            let tables = if alternating { &self.alternating } else { &self.direct };
            let table = tables.get(table)?.as_ref()?;
            if code > *table.largest.get(length)? {
                continue;
            }
            if length > 16 {
                self.warn("a wrong Huffman code");
                return Some(0);
            }
            let place = code + table.offset.get(length)?;
            return usize::try_from(place).ok().and_then(|place| table.symbols.get(place)).copied();
        }
    }

    /// Reads a number of `bits` bits. It is negative if its highest bit is 0.
    fn value(&mut self, bits: u32) -> Option<i32> {
        if bits == 0 {
            return Some(0);
        }
        let value = self.bits(bits)? as i32;
        Some(if value < 1 << (bits - 1) { value + 1 - (1 << bits) } else { value })
    }

    fn bits(&mut self, count: u32) -> Option<u32> {
        if self.left < count {
            self.fill(count)?;
        }
        self.left -= count;
        Some((self.buffer >> self.left) as u32 & ((1 << count) - 1))
    }

    /// Reads bytes up to the next marker, and appends zeros if `needed` is more than the available bits. Returns `None`
    /// at the end of the file, where libjpeg waits for more.
    fn fill(&mut self, needed: u32) -> Option<()> {
        while self.left <= 56 && self.marker.is_none() {
            let mut byte = self.byte()?;
            if byte == 0xFF {
                while byte == 0xFF {
                    byte = self.byte()?;
                }
                if byte != 0 {
                    self.marker = Some(byte);
                    break;
                }
                byte = 0xFF;
            }
            self.buffer = self.buffer << 8 | u64::from(byte);
            self.left += 8;
        }
        if needed > self.left {
            if !self.insufficient {
                self.warn("coded data that ends early");
                self.insufficient = true;
            }
            self.buffer <<= 57 - self.left;
            self.left = 57;
        }
        Some(())
    }

    /// Advances to the next restart marker. If another marker is found, libjpeg's rules decide.
    fn restart(&mut self) -> Option<()> {
        self.left = 0;
        let wanted = self.next_restart;
        let marker = match self.marker {
            Some(marker) => marker,
            None => self.next_marker()?,
        };
        self.marker = Some(marker);
        if marker == RST0 + wanted {
            self.marker = None;
        } else {
            self.warn("a restart marker out of order");
            loop {
                let marker = self.marker?;
                let ahead = marker.wrapping_sub(RST0).wrapping_sub(wanted) & 7;
                match marker {
                    ..0xC0 => {}
                    0xD0..=0xD7 => match ahead {
                        // One of the next two: this interval is lost.
                        1 | 2 => break,
                        // One of the last two: continue to the next marker.
                        6 | 7 => {}
                        _ => {
                            self.marker = None;
                            break;
                        }
                    },
                    _ => break,
                }
                self.marker = Some(self.next_marker()?);
            }
        }
        self.next_restart = (wanted + 1) & 7;
        if self.marker.is_none() {
            self.insufficient = false;
        }
        Some(())
    }
}
