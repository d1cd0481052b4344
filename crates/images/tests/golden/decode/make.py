"""Makes the images of this folder, and expected.json: what Pillow reads of each as RGB.

Every file is small and odd in one way. `python make.py FOLDER` writes another set, with larger
images, for the comparison with the Pillow that is installed.
"""

import io
import json
import struct
import sys
import zlib
from pathlib import Path

from PIL import Image, ImageOps, features


def scene(width, height, seed=1):
    """A smooth image with edges, by integer arithmetic: the same wherever this runs."""
    image = Image.new("RGB", (width, height))
    pixels = []
    for y in range(height):
        for x in range(width):
            disc = (x - width // 3) ** 2 + (y - height // 2) ** 2 < (min(width, height) // 3) ** 2
            noise = (x * 7919 + y * 104729 + seed * 1299709) * 2654435761 % 2**32 >> 27
            red = x * 255 // max(width - 1, 1)
            green = y * 255 // max(height - 1, 1)
            pixels.append((255 - red, green // 2 + noise, 200) if disc else (red, green, noise * 8))
    image.putdata(pixels)
    return image


def encoded(image, **options):
    out = io.BytesIO()
    image.save(out, **options)
    return out.getvalue()


def chunk(kind, data):
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png(width, height, depth, colour, rows, *extra):
    """A PNG that Pillow does not write: any depth and colour type, from packed rows."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [chunk(b"IHDR", head), *extra, chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpegs(image, grey):
    for name, sampling in [("444", 0), ("422", 1), ("420", 2)]:
        yield f"{name}.jpg", encoded(image, format="JPEG", quality=85, subsampling=sampling)
    yield "progressive.jpg", encoded(image, format="JPEG", quality=75, progressive=True)
    yield "restart.jpg", encoded(image, format="JPEG", quality=75, restart_marker_blocks=2)
    yield "grey.jpg", encoded(grey, format="JPEG", quality=85)
    yield "rgb.jpg", encoded(image, format="JPEG", quality=85, keep_rgb=True)
    yield "cmyk.jpg", encoded(image.convert("CMYK"), format="JPEG", quality=85)
    yield "low.jpg", encoded(image, format="JPEG", quality=5)
    for value in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = value
        yield f"exif{value}.jpg", encoded(image, format="JPEG", quality=90, exif=exif)


def pngs(image, grey):
    width, height = image.size
    alpha = image.copy()
    alpha.putalpha(grey)
    yield "rgb.png", encoded(image, format="PNG")
    yield "rgba.png", encoded(alpha, format="PNG")
    yield "grey.png", encoded(grey, format="PNG")
    yield "grey_alpha.png", encoded(alpha.convert("LA"), format="PNG")
    yield "palette.png", encoded(image.quantize(64, dither=0), format="PNG")
    yield "palette_16.png", encoded(image.quantize(16, dither=0), format="PNG", bits=4)
    yield "palette_transparent.png", encoded(image.quantize(9, dither=0), format="PNG", transparency=3)
    yield "bits_1.png", encoded(grey.point(lambda v: 255 * (v > 99)).convert("1"), format="PNG")
    bits = [bytes((x * 37 + y * 11) % 256 for x in range((width + 3) // 4)) for y in range(height)]
    yield "grey_2.png", png(width, height, 2, 0, bits)
    bits = [bytes((x * 37 + y * 11) % 256 for x in range((width + 1) // 2)) for y in range(height)]
    yield "grey_4.png", png(width, height, 4, 0, bits)
    wide = [
        b"".join(struct.pack(">H", (x * y * 7) % 700) for x in range(width)) for y in range(height)
    ]
    yield "grey_16.png", png(width, height, 16, 0, wide)
    wide = [
        b"".join(struct.pack(">HH", x * 999 % 65536, 40000) for x in range(width))
        for y in range(height)
    ]
    yield "grey_alpha_16.png", png(width, height, 16, 4, wide)
    wide = [
        b"".join(struct.pack(">HHH", x * 999 % 65536, y * 777 % 65536, 255) for x in range(width))
        for y in range(height)
    ]
    yield "rgb_16.png", png(width, height, 16, 2, wide)
    yield "rgb_transparent.png", png(
        width,
        height,
        8,
        2,
        [image.crop((0, y, width, y + 1)).tobytes() for y in range(height)],
        chunk(b"tRNS", struct.pack(">HHH", *image.getpixel((0, 0)))),
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "exif6.png", encoded(image, format="PNG", exif=exif)


def others(image, grey):
    alpha = image.copy()
    alpha.putalpha(grey)
    yield "rgb.bmp", encoded(image, format="BMP")
    yield "grey.bmp", encoded(grey, format="BMP")
    yield "bits_1.bmp", encoded(grey.convert("1", dither=0), format="BMP")
    yield "palette.bmp", encoded(image.quantize(200, dither=0), format="BMP")
    yield "rgba.bmp", encoded(alpha, format="BMP")
    palette = image.quantize(50, dither=0)
    yield "palette.gif", encoded(palette, format="GIF")
    yield "transparent.gif", encoded(palette, format="GIF", transparency=7)
    yield "grey.gif", encoded(grey, format="GIF")
    yield "interlaced.gif", encoded(palette, format="GIF", interlace=1)
    second = ImageOps.mirror(image).quantize(50, dither=0)
    yield "animated.gif", encoded(palette, format="GIF", save_all=True, append_images=[second])
    # A frame that covers a part of the screen: the screen's size is in bytes 6 to 9.
    part = bytearray(encoded(palette, format="GIF"))
    part[6:10] = struct.pack("<HH", image.width + 5, image.height + 3)
    at = part.index(b",\0\0\0\0")
    part[at + 1 : at + 5] = struct.pack("<HH", 2, 1)
    yield "part.gif", bytes(part)
    if features.check("webp"):
        yield "lossless.webp", encoded(image, format="WEBP", lossless=True)
        yield "lossy.webp", encoded(image, format="WEBP", quality=80)
        yield "alpha.webp", encoded(alpha, format="WEBP", lossless=True, exact=True)
        yield "lossy_alpha.webp", encoded(alpha, format="WEBP", quality=70)
        second = ImageOps.mirror(image)
        yield "animated.webp", encoded(
            image, format="WEBP", save_all=True, append_images=[second], lossless=True
        )


def small():
    for name, image in [("1x1", scene(1, 1)), ("1x9", scene(1, 9)), ("17x1", scene(17, 1))]:
        for kind in ["JPEG", "PNG", "BMP", "GIF", "WEBP"]:
            options = {"lossless": True} if kind == "WEBP" else {}
            yield f"{name}.{kind.lower()}", encoded(image, format=kind, **options)


def main(folder, width, height):
    folder.mkdir(parents=True, exist_ok=True)
    image = scene(width, height)
    grey = image.convert("L")
    expected = {}
    for files in [jpegs(image, grey), pngs(image, grey), others(image, grey), small()]:
        for name, data in files:
            (folder / name).write_bytes(data)
            opened = Image.open(io.BytesIO(data))
            turned = ImageOps.exif_transpose(opened).convert("RGB")
            rgb = opened.convert("RGB")
            expected[name] = {
                "size": rgb.size,
                "crc32": zlib.crc32(rgb.tobytes()),
                "turned": [turned.size, zlib.crc32(turned.tobytes())],
            }
            if name.endswith(".jpg") and opened.mode != "CMYK":
                # At a fraction of the size, as the decoder gives it.
                for part in [2, 4, 8]:
                    scaled = Image.open(io.BytesIO(data))
                    scaled.draft("RGB", (rgb.width // part, rgb.height // part))
                    crc = zlib.crc32(scaled.convert("RGB").tobytes())
                    expected[name][f"1/{part}"] = [scaled.size, crc]
            if len(sys.argv) > 1:
                (folder / f"{name}.rgb").write_bytes(rgb.tobytes())
    text = json.dumps({"pillow": Image.__version__, "images": expected}, indent=1)
    (folder / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), 211, 148)
    else:
        main(Path(__file__).parent, 83, 59)
