//! Memory that a thread needs to read samples, reused from one sample to the next.

use std::fmt;

use super::cache::{Cache, Cached};
use super::raw;
use crate::Result;
use crate::decode::{DecodeOptions, Decoder, Header};
use crate::image::{CropBox, Image, ImageView, Region, Size};
use crate::source::ImageSource;
use crate::transforms::{Compose, Flips, Phase, Pixels, Plan, RegionReader, Renderer};

/// Memory that a thread needs to read samples: for the encoded bytes, the decoder, and each step of the transforms.
/// Made by [`ImageSamples::reader`](crate::ImageSamples::reader).
pub struct SampleReader {
    bytes: Vec<u8>,
    /// Image that was read from a cache or is to be written to it.
    kept: Image,
    decoder: Decoder,
    renderer: Renderer,
    /// Size of the last image before all transforms; `None` if it came from a cache.
    decoded_size: Option<Size>,
    /// `true` if the decoder read the last image.
    is_decoded: bool,
}

impl SampleReader {
    pub(crate) fn new(options: &DecodeOptions) -> Self {
        Self {
            bytes: Vec::new(),
            kept: Image::scratch(),
            decoder: Decoder::new(options.clone()),
            renderer: Renderer::new(),
            decoded_size: None,
            is_decoded: false,
        }
    }

    /// Returns the warning of the last image, if it is damaged and was read nevertheless; see [`Decoder::warning`].
    pub(crate) fn warning(&self) -> Option<&str> {
        self.is_decoded.then(|| self.decoder.warning()).flatten()
    }

    /// Returns the memory for encoded bytes.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Decodes and transforms the encoded bytes by the plan for the size in their header.
    pub(crate) fn transform(
        &mut self,
        name: &str,
        reducing_gap: Option<f64>,
        plan: impl FnOnce(Size) -> Result<Plan>,
    ) -> Result<()> {
        self.is_decoded = false;
        if let Some(view) = raw::view(name, &self.bytes) {
            let view = view?;
            self.decoded_size = Some(view.size());
            return self.renderer.render(view, &plan(view.size())?);
        }
        let header = self.decoder.header(name, &self.bytes)?;
        self.decoded_size = Some(header.size);
        let plan = plan(header.size)?;
        self.renderer.reducing_gap = reducing_gap;
        let mut encoded = Encoded { name, bytes: &self.bytes, header, decoder: &mut self.decoder };
        self.renderer.render(Pixels::Reader(&mut encoded), &plan)?;
        self.is_decoded = true;
        Ok(())
    }

    /// Reads an image of a source, decodes it and transforms it as in validation.
    pub(crate) fn read_whole<S: ImageSource + ?Sized>(
        &mut self,
        source: &S,
        index: usize,
        transforms: &Compose,
    ) -> Result<()> {
        source.read(index, &mut self.bytes)?;
        self.transform(&source.name(index), None, |size| transforms.plan(size, Phase::Valid, 0))
    }

    /// Transforms the cached image by the plan of `rest` for its size. Returns `false` if it is not in the cache.
    pub(super) fn transform_cached(
        &mut self,
        cache: &Cache,
        index: usize,
        rest: impl FnOnce(Size) -> Result<Plan>,
    ) -> Result<bool> {
        self.decoded_size = None;
        match cache.find(index, &mut self.kept) {
            None => return Ok(false),
            Some(Cached::Read) => {
                let view = self.kept.view();
                self.renderer.render(view, &rest(view.size())?)?;
            }
            Some(Cached::Stored(mut stored)) => {
                let plan = rest(stored.size())?;
                self.renderer.render(Pixels::Reader(&mut stored), &plan)?;
            }
        }
        Ok(true)
    }

    /// Caches the image that was just transformed, and transforms it further.
    pub(super) fn keep_and_transform(
        &mut self,
        cache: &Cache,
        index: usize,
        rest: impl FnOnce(Size) -> Result<Plan>,
    ) -> Result<()> {
        self.renderer.swap_image(&mut self.kept);
        let view = self.kept.view();
        cache.keep(index, view);
        self.renderer.render(view, &rest(view.size())?)
    }

    /// Returns a copy of the last image, mirrored as its plan requires.
    ///
    /// # Errors
    /// Fails if no image was read before.
    pub fn take_image(&mut self) -> Result<Image> {
        self.renderer.swap_image(&mut self.kept);
        let Size { width, height } = self.kept.size();
        Image::new(width, height, self.kept.pixels().to_vec())
    }

    pub(super) fn decoded_size(&self) -> Option<Size> {
        self.decoded_size
    }

    /// Returns a view of the last image, and the mirroring that the caller still has to apply when it copies the
    /// pixels.
    #[must_use]
    pub fn image(&self) -> (ImageView<'_>, Flips) {
        self.renderer.image()
    }
}

impl fmt::Debug for SampleReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SampleReader").finish_non_exhaustive()
    }
}

/// An encoded image, which is decoded by region when its plan is known.
struct Encoded<'a> {
    name: &'a str,
    bytes: &'a [u8],
    header: Header,
    decoder: &'a mut Decoder,
}

impl RegionReader for Encoded<'_> {
    fn size(&self) -> Size {
        self.header.size
    }

    fn read(
        &mut self,
        region: Region,
        at_least: Option<Size>,
        target: &mut Image,
    ) -> Result<CropBox> {
        self.decoder.decode_region_of(self.header, self.name, self.bytes, region, at_least, target)
    }
}
