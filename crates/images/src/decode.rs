//! Decoding of images to pixels, with the same results as Pillow's `Image.open(…).convert("RGB")`.
//!
//! The format is recognized by a file's first bytes, not by its name. Alpha is dropped, not blended; grey becomes three
//! equal colours; palettes are looked up; CMYK is converted by Pillow's formula, without colour profiles. Of an
//! animation, the first frame is read.

mod bmp;
mod gif;
mod jpeg;
mod orientation;
mod png;
mod pnm;
mod tiff;
mod webp;

use std::fmt;
use std::panic::{self, AssertUnwindSafe};

pub use self::orientation::Orientation;
use crate::image::{CropBox, Image, NoMemory, Region, Size};
use crate::{ImageError, Result};

/// Options of a [`Decoder`]: the maximum number of pixels, and the use of the EXIF orientation.
///
/// ```
/// use brigade_images::decode::DecodeOptions;
///
/// let options = DecodeOptions::new().exif_orientation(true).max_pixels(20_000_000);
/// assert_ne!(options, DecodeOptions::default());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeOptions {
    max_pixels: u64,
    exif_orientation: bool,
}

/// Maximum number of pixels that Pillow reads without an error (`2 * Image.MAX_IMAGE_PIXELS`).
const MAX_PIXELS: u64 = 178_956_970;

impl Default for DecodeOptions {
    fn default() -> Self {
        Self { max_pixels: MAX_PIXELS, exif_orientation: false }
    }
}

impl DecodeOptions {
    /// Creates the default options: at most 178,956,970 pixels, as in Pillow, and pixels in their stored orientation,
    /// like torchvision's and fastai's loaders.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum number of pixels of an image. A larger image is an error. Decoding takes three to eight bytes
    /// of memory per pixel. Defaults to 178,956,970, as in Pillow.
    #[must_use]
    pub fn max_pixels(mut self, limit: u64) -> Self {
        self.max_pixels = limit;
        self
    }

    /// Sets whether images are rotated and mirrored by the orientation in their EXIF data, like Pillow's
    /// `ImageOps.exif_transpose`. Defaults to `false`.
    #[must_use]
    pub fn exif_orientation(mut self, turn: bool) -> Self {
        self.exif_orientation = turn;
        self
    }
}

/// The format of an encoded image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageFormat {
    /// JPEG: baseline or progressive; grey, YCbCr, RGB, CMYK or YCCK.
    Jpeg,
    /// PNG in all its colour types.
    Png,
    /// WebP, lossy or lossless.
    WebP,
    /// Windows bitmap files (BMP).
    Bmp,
    /// GIF; of an animation, the first frame.
    Gif,
    /// TIFF and BigTIFF; of a file with several images, the first.
    Tiff,
    /// PBM, PGM and PPM, plain or binary.
    Pnm,
}

impl ImageFormat {
    /// Returns the format of a file that begins with these bytes, or `None` if it is not known.
    ///
    /// ```
    /// use brigade_images::decode::ImageFormat;
    ///
    /// assert_eq!(ImageFormat::of(b"\xff\xd8\xff\xe0"), Some(ImageFormat::Jpeg));
    /// assert_eq!(ImageFormat::of(b"a text"), None);
    /// ```
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let begins = |magic: &[u8]| bytes.starts_with(magic);
        if begins(b"\xff\xd8\xff") {
            Some(Self::Jpeg)
        } else if begins(b"\x89PNG\r\n\x1a\n") {
            Some(Self::Png)
        } else if begins(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
            Some(Self::WebP)
        } else if begins(b"GIF87a") || begins(b"GIF89a") {
            Some(Self::Gif)
        } else if begins(b"BM") {
            Some(Self::Bmp)
        } else if tiff::is_magic(bytes) {
            Some(Self::Tiff)
        } else if pnm::is_magic(bytes) {
            Some(Self::Pnm)
        } else {
            None
        }
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Jpeg => "JPEG",
            Self::Png => "PNG",
            Self::WebP => "WebP",
            Self::Bmp => "BMP",
            Self::Gif => "GIF",
            Self::Tiff => "TIFF",
            Self::Pnm => "PNM",
        })
    }
}

/// Format, size and orientation of an image, known before its pixels are decoded.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::decode::{DecodeOptions, Decoder, ImageFormat};
///
/// # let gif = b"GIF89a\x02\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x02\0\x01\0\0\x02\x02D\n\0;";
/// let header = Decoder::new(DecodeOptions::new()).header("two.gif", gif)?;
/// assert_eq!((header.format, header.size), (ImageFormat::Gif, Size::new(2, 1)));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Format of the image, recognized by the first bytes.
    pub format: ImageFormat,
    /// Size of the decoded image, after the EXIF orientation if [`DecodeOptions::exif_orientation`] is on.
    pub size: Size,
    /// Rotation and mirroring that the decoder applies to the stored pixels. [`Orientation::Normal`] unless that option
    /// is on or the format is TIFF, whose orientation Pillow always applies.
    pub orientation: Orientation,
}

/// Decodes images. It reuses memory, so that a thread should keep one for many images.
///
/// ```
/// use brigade_images::Image;
/// use brigade_images::decode::{DecodeOptions, Decoder};
///
/// # let gif = b"GIF89a\x02\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x02\0\x01\0\0\x02\x02D\n\0;";
/// let image = Decoder::new(DecodeOptions::new()).decode_new("two.gif", gif)?;
/// assert_eq!(image, Image::new(2, 1, vec![0, 0, 0, 255, 255, 255])?);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Debug)]
pub struct Decoder {
    options: DecodeOptions,
    /// The stored pixels, before the orientation is applied.
    stored: Image,
    warning: Option<String>,
}

/// Header of a file, as its format's decoder reads it: the size, and the orientation in EXIF data.
struct Found {
    size: Size,
    orientation: Orientation,
}

impl Decoder {
    /// Creates a decoder.
    #[must_use]
    pub fn new(options: DecodeOptions) -> Self {
        Self { options, stored: Image::scratch(), warning: None }
    }

    /// Returns the warning of the last image, if it is damaged and was decoded nevertheless: a JPEG that libjpeg, and
    /// therefore Pillow, reads with a warning, such as one with a wrong Huffman code. Its pixels equal those of
    /// libjpeg; some of them are wrong.
    #[must_use]
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Reads the format and the size of an image, without its pixels. `name` is used in error messages.
    ///
    /// # Errors
    /// [`ImageError::Decode`] if the bytes are not an image of a known format or the header is damaged, and
    /// [`ImageError::TooLarge`] beyond [`DecodeOptions::max_pixels`].
    pub fn header(&self, name: &str, bytes: &[u8]) -> Result<Header> {
        let format = format_of(name, bytes)?;
        let found = guarded(name, format, || match format {
            ImageFormat::Jpeg => jpeg::header(bytes),
            ImageFormat::Png => png::header(bytes),
            ImageFormat::WebP => webp::header(bytes),
            ImageFormat::Bmp => bmp::header(bytes),
            ImageFormat::Gif => gif::header(bytes),
            ImageFormat::Tiff => tiff::header(bytes),
            ImageFormat::Pnm => pnm::header(bytes),
        })?;
        let Size { width, height } = found.size;
        let limit = self.options.max_pixels;
        if found.size.pixels() > limit {
            return Err(ImageError::TooLarge { name: name.to_owned(), width, height, limit });
        }
        if width == 0 || height == 0 {
            return Err(broken(name, format, &format!("it is {} pixels", found.size)));
        }
        // Pillow applies the orientation of TIFF files in any case.
        let turned = self.options.exif_orientation || format == ImageFormat::Tiff;
        let orientation = if turned { found.orientation } else { Orientation::Normal };
        Ok(Header { format, size: orientation.size_after(found.size), orientation })
    }

    /// Decodes an image into `target`, whose memory is reused.
    ///
    /// # Errors
    /// Returns the same errors as [`Decoder::header`], and fails if the pixels are damaged or end too early. The
    /// content of `target` is then undefined.
    pub fn decode(&mut self, name: &str, bytes: &[u8], target: &mut Image) -> Result<()> {
        let header = self.header(name, bytes)?;
        self.decode_of(header, name, bytes, target)
    }

    fn decode_of(
        &mut self,
        header: Header,
        name: &str,
        bytes: &[u8],
        target: &mut Image,
    ) -> Result<()> {
        let Header { format, size, orientation } = header;
        self.warning = None;
        if orientation == Orientation::Normal {
            self.warning = decode_stored(name, format, bytes, size, target)?;
            return Ok(());
        }
        let stored = orientation.size_before(size);
        self.warning = decode_stored(name, format, bytes, stored, &mut self.stored)?;
        orientation.apply(self.stored.view(), target)?;
        Ok(())
    }

    /// Decodes an image into new memory.
    ///
    /// # Errors
    /// Returns the same errors as [`Decoder::decode`].
    pub fn decode_new(&mut self, name: &str, bytes: &[u8]) -> Result<Image> {
        let mut image = Image::scratch();
        self.decode(name, bytes, &mut image)?;
        Ok(image)
    }

    /// Decodes a segmentation mask, whose pixels are class numbers: grey values, or the palette indices of a PNG, TIFF
    /// or BMP file, as Pillow reads them without a conversion. All three bytes of a pixel of the result are its class.
    ///
    /// # Errors
    /// Returns the same errors as [`Decoder::decode`], and fails if the pixels are colours.
    ///
    /// ```
    /// use brigade_images::decode::{DecodeOptions, Decoder};
    ///
    /// # let gif = b"GIF89a\x02\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x02\0\x01\0\0\x02\x02D\n\0;";
    /// let mask = Decoder::new(DecodeOptions::new()).decode_mask("two.gif", gif)?;
    /// assert_eq!(mask.pixels(), [0, 0, 0, 255, 255, 255]);
    /// # Ok::<(), brigade_images::ImageError>(())
    /// ```
    pub fn decode_mask(&mut self, name: &str, bytes: &[u8]) -> Result<Image> {
        let Header { format, size, orientation } = self.header(name, bytes)?;
        let mut mask = Image::scratch();
        let stored = orientation.size_before(size);
        let numbers = guarded(name, format, || match format {
            ImageFormat::Png => png::decode_numbers(bytes, stored, &mut mask),
            ImageFormat::Bmp => bmp::decode(bytes, &mut mask, true),
            ImageFormat::Tiff => tiff::decode(bytes, &mut mask, true),
            ImageFormat::Pnm if pnm::is_wide(bytes)? => {
                Err(Problem("it has 16 bits a pixel, a mask of classes 8 at most".to_owned()))
            }
            _ => Ok(false),
        })?;
        self.warning = None;
        if !numbers {
            self.warning = decode_stored(name, format, bytes, stored, &mut mask)?;
            let coloured = |pixel: &&[u8; 3]| pixel[0] != pixel[1] || pixel[0] != pixel[2];
            if let Some(pixel) = mask.pixels().as_chunks::<3>().0.iter().find(coloured) {
                let detail = format!(
                    "not a mask: a pixel has the colour {pixel:?}; classes must be grey values or a \
                     palette of PNG, TIFF or BMP"
                );
                return Err(broken(name, format, &detail));
            }
        }
        if orientation == Orientation::Normal {
            return Ok(mask);
        }
        let mut turned = Image::scratch();
        orientation.apply(mask.view(), &mut turned)?;
        Ok(turned)
    }

    /// Decodes a region of an image, and returns its position in `target`, which may contain more than the region.
    ///
    /// With a size in `at_least`, a JPEG is decoded at the smallest of 1/1, 1/2, 1/4 and 1/8 of its size at which the
    /// region has at least that many pixels in each direction, like Pillow's `draft`; with `None` the pixels are those
    /// of [`Decoder::decode`]. A JPEG of four colours of which some have fewer samples is always decoded at its size. Of
    /// other JPEGs, only the blocks that the region needs are converted to pixels; other formats
    /// are decoded completely.
    ///
    /// # Errors
    /// Returns the same errors as [`Decoder::decode`], and [`ImageError::InvalidArgument`] for a region that is not
    /// inside of the image.
    pub fn decode_region(
        &mut self,
        name: &str,
        bytes: &[u8],
        region: Region,
        at_least: Option<Size>,
        target: &mut Image,
    ) -> Result<CropBox> {
        let header = self.header(name, bytes)?;
        self.decode_region_of(header, name, bytes, region, at_least, target)
    }

    /// Decodes a region of an image whose header was read before. Reading a JPEG's header costs a fortieth of decoding
    /// its pixels.
    pub(crate) fn decode_region_of(
        &mut self,
        header: Header,
        name: &str,
        bytes: &[u8],
        region: Region,
        at_least: Option<Size>,
        target: &mut Image,
    ) -> Result<CropBox> {
        let Header { format, size, orientation } = header;
        if !region.lies_in(size) {
            return Err(ImageError::InvalidArgument(format!(
                "the region of {region} is not in {name}, which has {size} pixels"
            )));
        }
        if format != ImageFormat::Jpeg {
            self.decode_of(header, name, bytes, target)?;
            return Ok(region.into());
        }
        let whole = orientation.size_before(size);
        let stored = orientation.region_before(region, size);
        let at_least = at_least.map(|size| orientation.size_before(size));
        let into = match orientation {
            Orientation::Normal => &mut *target,
            _ => &mut self.stored,
        };
        self.warning = None;
        let (place, warning) =
            guarded(name, format, || jpeg::decode_region(bytes, whole, stored, at_least, into))?;
        self.warning = warning;
        if orientation == Orientation::Normal {
            return Ok(place);
        }
        orientation.apply(self.stored.view(), target)?;
        Ok(orientation.crop_after(place, self.stored.size()))
    }
}

fn decode_stored(
    name: &str,
    format: ImageFormat,
    bytes: &[u8],
    size: Size,
    target: &mut Image,
) -> Result<Option<String>> {
    guarded(name, format, || {
        match format {
            ImageFormat::Jpeg => {
                let whole = Region::whole(size);
                return Ok(jpeg::decode_region(bytes, size, whole, None, target)?.1);
            }
            ImageFormat::Png => png::decode(bytes, size, target)?,
            ImageFormat::WebP => webp::decode(bytes, size, target)?,
            ImageFormat::Bmp => bmp::decode(bytes, target, false).map(drop)?,
            ImageFormat::Gif => gif::decode(bytes, size, target)?,
            ImageFormat::Tiff => tiff::decode(bytes, target, false).map(drop)?,
            ImageFormat::Pnm => pnm::decode(bytes, target)?,
        }
        Ok(None)
    })
}

fn format_of(name: &str, bytes: &[u8]) -> Result<ImageFormat> {
    ImageFormat::of(bytes).ok_or_else(|| {
        let detail = if bytes.is_empty() {
            "the file is empty".to_owned()
        } else if let Some((format, endings)) = refused(bytes) {
            format!(
                "it is {format}, which is not read; convert it: `magick mogrify -format png {endings}`"
            )
        } else {
            let begin = bytes.get(..12).unwrap_or(bytes).escape_ascii();
            format!("it begins with \"{begin}\", which is not a JPEG, PNG, WebP, BMP, GIF, TIFF \
                     or PNM file")
        };
        ImageError::Decode { name: name.to_owned(), detail }
    })
}

/// Returns the name of a known format that is not supported, and its usual file extension.
fn refused(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    if bytes.starts_with(b"\0\0\0\x0cjP  \r\n\x87\n") || bytes.starts_with(b"\xff\x4f\xff\x51") {
        return Some(("JPEG 2000", "*.jp2"));
    }
    if bytes.starts_with(b"\xff\x0a") || bytes.starts_with(b"\0\0\0\x0cJXL \r\n\x87\n") {
        return Some(("JPEG XL", "*.jxl"));
    }
    match (bytes.get(4..8)?, bytes.get(8..12)?) {
        (b"ftyp", b"avif" | b"avis") => Some(("AVIF", "*.avif")),
        (b"ftyp", b"heic" | b"heix" | b"heim" | b"heis" | b"hevc" | b"mif1" | b"msf1") => {
            Some(("HEIF", "*.heic"))
        }
        _ => None,
    }
}

/// Runs a decoder. A panic is caused by damage that the decoder does not handle, and becomes an error; the partial
/// result is discarded.
fn guarded<T>(
    name: &str,
    format: ImageFormat,
    decode: impl FnOnce() -> Result<T, Problem>,
) -> Result<T> {
    let result = panic::catch_unwind(AssertUnwindSafe(decode));
    let result = result.unwrap_or_else(|_| Err(Problem("the decoder has panicked".to_owned())));
    result.map_err(|Problem(detail)| broken(name, format, &detail))
}

fn broken(name: &str, format: ImageFormat, detail: &str) -> ImageError {
    ImageError::Decode { name: name.to_owned(), detail: format!("as {format}: {detail}") }
}

/// Description of a fault in an image.
#[derive(Debug)]
struct Problem(String);

impl Problem {
    fn new(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }

    /// Returns the fault of a file that is too short for the pixels of its header.
    fn too_few_bytes(size: Size, bytes: usize) -> Self {
        Self(format!("{bytes} bytes are too few for the {size} pixels of its header"))
    }
}

impl From<NoMemory> for Problem {
    fn from(NoMemory(size): NoMemory) -> Self {
        Self(format!("there is no memory for {size} pixels"))
    }
}
