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


def four_colours(image):
    """JPEGs of four colours of which some have fewer samples."""
    width, height = image.size
    for name, sampling in [("422", 1), ("420", 2)]:
        data = encoded(image.convert("CMYK"), format="JPEG", quality=85, subsampling=sampling)
        yield f"cmyk_{name}.jpg", data
        # The last byte of Adobe's marker makes YCCK of it.
        at = data.index(b"Adobe") + 11
        yield f"ycck_{name}.jpg", data[:at] + b"\2" + data[at + 1 :]
    # Factors that Pillow does not write: the blocks of a file without subsampling, one of each colour in turn, in
    # another order. The order does not matter to a decoder.
    for name, factors in [("420_full_black", "\x22\x11\x11\x22"), ("440", "\x12\x11\x11\x12")]:
        down, across = ord(factors[0]) & 15, ord(factors[0]) >> 4
        blocks = -(-width // (8 * across)) * -(-height // (8 * down)) * (2 * across * down + 2)
        source = scene(8 * -(-blocks // 4), 8).convert("CMYK").point(lambda v: 112 + v // 16)
        data = bytearray(encoded(source, format="JPEG", quality=85))
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
        for number, factor in enumerate(factors):
            data[frame + 11 + 3 * number] = ord(factor)
        data[data.index(b"Adobe") + 11] = 2
        yield f"ycck_{name}.jpg", bytes(data)


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


def bmp(header, palette, data, offset=None):
    """A BMP of a header, whose length is its own first four bytes, a palette and pixels."""
    start = 14 + len(header) + len(palette) if offset is None else offset
    return struct.pack("<2sIII", b"BM", 14 + len(header) + len(palette) + len(data), 0, start) + (
        header + palette + data
    )


def bmps(image):
    """Kinds that Pillow does not write."""
    width, height = image.size

    def info(bits, compression=0, length=40, masks=b"", colours=0, down=False):
        size = -height if down else height
        fields = (length, width, size, 1, bits, compression, 0, 2835, 2835, colours, 0)
        return (struct.pack("<IiiHHIIiiII", *fields) + masks).ljust(length, b"\0")

    def rows(pixel):
        for y in reversed(range(height)):
            row = b"".join(pixel(image.getpixel((x, y)), x + y) for x in range(width))
            yield row + b"\0" * (-len(row) % 4)

    def packed(bits):
        def pixel(rgb, _):
            red, green, blue = rgb
            value = red >> 3 << 5 + bits | green >> 8 - bits << 5 | blue >> 3
            return struct.pack("<H", value)

        return pixel

    full = b"".join(rows(lambda rgb, _: bytes(reversed(rgb))))
    core = struct.pack("<IHHHH", 12, width, height, 1, 24)
    yield "os2.bmp", bmp(core, b"", full)
    upside = [full[start : start + len(full) // height] for start in range(0, len(full), len(full) // height)]
    yield "top_down.bmp", bmp(info(24, down=True), b"", b"".join(reversed(upside)))
    yield "555.bmp", bmp(info(16), b"", b"".join(rows(packed(5))))
    masks = struct.pack("<III", 0xF800, 0x7E0, 0x1F)
    yield "565.bmp", bmp(info(16, 3) + masks, b"", b"".join(rows(packed(6))))
    four = b"".join(rows(lambda rgb, sum: bytes([sum % 256, *rgb])))
    masks = struct.pack("<IIII", 0xFF000000, 0xFF0000, 0xFF00, 0xFF)
    yield "abgr.bmp", bmp(info(32, 3, 108, masks), b"", four)
    masks = struct.pack("<IIII", 0xFF, 0xFF00, 0xFF0000, 0xFF000000)
    yield "rgba_masks.bmp", bmp(info(32, 3, 124, masks), b"", four)

    indexed = image.quantize(13, dither=0)
    colours = indexed.getpalette()[: 3 * 13]
    table = b"".join(bytes([*reversed(colours[at : at + 3]), 0]) for at in range(0, 39, 3))
    places = [[indexed.getpixel((x, y)) for x in range(width)] for y in reversed(range(height))]
    short = b"".join(bytes(colours[at : at + 3][::-1]) for at in range(0, 39, 3))
    core = struct.pack("<IHHHH", 12, width, height, 1, 8)
    data = b"".join(bytes(row) + b"\0" * (-width % 4) for row in places)
    yield "os2_palette.bmp", bmp(core, short.ljust(768, b"\0"), data)
    runs = bytearray()
    for y, row in enumerate(places):
        at = 0
        while at < width:
            if y % 3 == 0 and width - at >= 5:
                # Five pixels as they are.
                runs += bytes([0, 5, *row[at : at + 5], 0])
                at += 5
                continue
            count = 1
            while at + count < width and count < 255 and row[at + count] == row[at]:
                count += 1
            runs += bytes([count, row[at]])
            at += count
        runs += b"\0\0"
        if y == 4:
            # A row and seven pixels are left out, and the last run goes over the end.
            runs += b"\0\2\7\1"
            runs += bytes([255, 3]) + b"\0\0"
    yield "rle8.bmp", bmp(info(8, 1, colours=13), table, bytes(runs) + b"\0\1")
    runs = bytearray()
    for y, row in enumerate(places):
        for at in range(0, width, 4):
            part = (row[at : at + 4] + [0, 0, 0])[:4]
            if y % 2 == 0 and width - at >= 4:
                runs += bytes([0, 4, part[0] << 4 | part[1], part[2] << 4 | part[3]])
            else:
                runs += bytes([min(4, width - at), part[0] << 4 | part[1]])
        runs += b"\0\0"
    yield "rle4.bmp", bmp(info(4, 2, colours=13), table, bytes(runs) + b"\0\1")


def tiff(order, tags, chunks):
    """A TIFF of tags, and of strips or tiles, whose places and lengths are added: 273 and 279, or 324 and 325."""
    tiled = 322 in tags
    count = len(tags) + 2
    data, places = b"", []
    start = 8 + 2 + 12 * count + 4
    for chunk in chunks:
        places.append(start + len(data))
        data += chunk
    tags = tags | {324 if tiled else 273: places, 325 if tiled else 279: [len(it) for it in chunks]}
    entries, more = b"", b""
    for tag, values in sorted(tags.items()):
        wide = tag in (273, 279, 324, 325)
        values = values if isinstance(values, list) else [values]
        packed = struct.pack(f"{order}{len(values)}{'I' if wide else 'H'}", *values)
        if len(packed) > 4:
            at = start + len(data) + len(more)
            more += packed
            packed = struct.pack(f"{order}I", at)
        entries += struct.pack(f"{order}HHI", tag, 4 if wide else 3, len(values)) + packed.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(f"{order}IH", 8, count) + entries + b"\0" * 4 + data + more


def tiffs(image):
    width, height = image.size
    grey = image.convert("L")
    alpha = image.copy()
    alpha.putalpha(grey)
    bits = grey.point(lambda v: 255 * (v > 99)).convert("1")
    for kind in ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"]:
        yield f"{kind}.tif", encoded(image, format="TIFF", compression=kind)
    yield "predictor.tif", encoded(image, format="TIFF", compression="tiff_lzw", tiffinfo={317: 2})
    for kind in ["group3", "group4"]:
        yield f"{kind}.tif", encoded(bits, format="TIFF", compression=kind)
    yield "fax_runs.tif", encoded(bits, format="TIFF", compression="tiff_ccitt")
    # Runs of 64 and more take two codes.
    long = Image.new("1", (200, 4), 1)
    long.paste(0, (0, 1, 200, 2))
    long.paste(0, (64, 2, 192, 3))
    yield "fax_long_runs.tif", encoded(long, format="TIFF", compression="tiff_ccitt")
    yield "bits.tif", encoded(bits, format="TIFF")
    yield "grey.tiff", encoded(grey, format="TIFF", compression="packbits")
    yield "palette.tif", encoded(image.quantize(50, dither=0), format="TIFF", compression="tiff_lzw")
    yield "grey_alpha.tif", encoded(alpha.convert("LA"), format="TIFF")
    yield "rgba.tif", encoded(alpha, format="TIFF", compression="tiff_lzw")
    yield "cmyk.tif", encoded(image.convert("CMYK"), format="TIFF", compression="tiff_lzw")
    yield "float.tif", encoded(grey.convert("F").point(lambda v: v * 1.7 - 40.5), format="TIFF")
    yield "signed.tif", encoded(grey.convert("I").point(lambda v: v * 3 - 99), format="TIFF")
    yield "turned.tif", encoded(image, format="TIFF", compression="tiff_lzw", tiffinfo={274: 6})
    yield "big.tif", encoded(grey, format="TIFF", big_tiff=True)

    size = {256: width, 257: height}
    planes = [image.getchannel(channel).tobytes() for channel in range(3)]
    tags = size | {258: [8, 8, 8], 259: 1, 262: 2, 277: 3, 278: height, 284: 2}
    yield "planar.tif", tiff(">", tags, planes)
    wide = [(x * 999 + y * 7) % 65536 for y in range(height) for x in range(width)]
    for name, order in [("grey_16", "<"), ("grey_16_big", ">")]:
        tags = size | {258: 16, 259: 1, 262: 1, 277: 1, 278: height}
        yield f"{name}.tif", tiff(order, tags, [struct.pack(f"{order}{len(wide)}H", *wide)])
    tags = size | {258: 4, 259: 1, 262: 0, 277: 1, 278: 3, 266: 2}
    line = (width + 1) // 2
    rows = [bytes((x * 37 + y * 11) % 256 for x in range(line)) for y in range(height)]
    yield "grey_4.tif", tiff("<", tags, [b"".join(rows[y : y + 3]) for y in range(0, height, 3)])
    # Tiles of 16 x 16 pixels of three samples of 16 bits, as differences.
    tiles = []
    for top in range(0, height, 16):
        for left in range(0, width, 16):
            data = b""
            for y in range(top, top + 16):
                before = (0, 0, 0)
                for x in range(left, left + 16):
                    inside = x < width and y < height
                    pixel = tuple(it * 251 for it in image.getpixel((x, y))) if inside else (0, 0, 0)
                    data += struct.pack(">3H", *((a - b) % 65536 for a, b in zip(pixel, before)))
                    before = pixel
            tiles.append(zlib.compress(data))
    tags = size | {258: [16] * 3, 259: 8, 262: 2, 277: 3, 317: 2, 322: 16, 323: 16}
    yield "tiles_16.tif", tiff(">", tags, tiles)
    # Colours that were multiplied by their alpha.
    data = b"".join(
        bytes([*(it * a // 255 for it in image.getpixel((x, y))), a])
        for y in range(height)
        for x in range(width)
        for a in [(x * 11 + y * 5) % 256]
    )
    tags = size | {258: [8] * 4, 259: 1, 262: 2, 277: 4, 278: height, 338: 1}
    yield "premultiplied.tif", tiff("<", tags, [data])


def mpos(image):
    second = ImageOps.mirror(image)
    yield "two.mpo", encoded(image, format="MPO", save_all=True, append_images=[second])


def pnms(image):
    width, height = image.size
    grey = image.convert("L")
    yield "bits.pbm", encoded(grey.convert("1", dither=0), format="PPM")
    yield "grey.pgm", encoded(grey, format="PPM")
    yield "rgb.ppm", encoded(image, format="PPM")
    values = list(grey.tobytes())
    text = " ".join(str(int(v > 99)) for v in values)
    yield "plain.pbm", f"P1 # bits\n{width} {height}\n{text}\n".encode()
    tight = text.replace(" ", "")
    yield "tight.pbm", f"P1\n{width} {height}\n{tight}".encode()
    text = "\n".join(str(v * 100 // 255) for v in values)
    yield "plain.pgm", f"P2\n# a comment\n{width} {height} 100\n{text}\n".encode()
    text = " ".join(str(v) for v in image.tobytes())
    yield "plain.ppm", f"P3\n{width} # columns\n{height}\n255\n{text}\n".encode()
    text = bytes(v * 77 // 255 for v in values)
    yield "maximum_77.pgm", f"P5\n{width} {height}\n77\n".encode() + text
    wide = [v * 257 % 3001 for v in values]
    wide = struct.pack(f">{len(wide)}H", *wide)
    yield "grey_3000.pgm", f"P5\n{width} {height}\n3000\n".encode() + wide
    yield "grey_16.pgm", f"P5\n{width} {height}\n65535\n".encode() + wide
    wide = [v * 250 % 1001 for v in image.tobytes()]
    wide = struct.pack(f">{len(wide)}H", *wide)
    yield "rgb_1000.ppm", f"P6\n{width} {height}\n1000\n".encode() + wide


def small():
    for name, image in [("1x1", scene(1, 1)), ("1x9", scene(1, 9)), ("17x1", scene(17, 1))]:
        for kind in ["JPEG", "PNG", "BMP", "GIF", "WEBP"]:
            options = {"lossless": True} if kind == "WEBP" else {}
            yield f"{name}.{kind.lower()}", encoded(image, format=kind, **options)


def damaged(name, data):
    """Changes of a JPEG, each as a place, how many bytes go there, and which come, with what Pillow reads then."""
    scan = data.index(b"\xff\xda")
    start = scan + 2 + int.from_bytes(data[scan + 2 : scan + 4], "big")
    length = len(data) - 2 - start
    changes = []
    for step in range(26):
        at = start + step * 7919 % length
        changes.append((at, 1, bytes([data[at] ^ 1 << step % 8])))
    for step in range(6):
        at = start + (step + 1) * length // 7
        # The end, a restart out of place, bytes that are missing, bytes too many, ones, the end of the file.
        changes.append((at, 0, b"\xff\xd9"))
        changes.append((at, 0, bytes([0xFF, 0xD0 + step])))
        changes.append((at, 5 + step, b""))
        changes.append((at, 0, b"\x12\x34"))
        changes.append((at, 3, b"\xff\x00\xff"))
        changes.append((at, len(data) - at, b""))
    # Before a marker, and in what is not needed.
    changes += [(2, 0, b"\0" * 7), (scan, 0, b"junk"), (len(data) - 2, 0, b"\0\0\0"), (len(data) - 2, 2, b"")]
    exif = b"Exif\0\0II*\0\xff\xff\xff\x7f\x01\x00"
    changes.append((2, 0, b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif))
    for at, gone, new in changes:
        changed = data[:at] + new + data[at + gone :]
        try:
            opened = Image.open(io.BytesIO(changed))
            crc = zlib.crc32(opened.convert("RGB").tobytes())
        except (OSError, SyntaxError):
            crc = None
        yield [name, at, gone, new.hex(), crc]


def main(folder, width, height):
    folder.mkdir(parents=True, exist_ok=True)
    image = scene(width, height)
    grey = image.convert("L")
    expected = {}
    # Without compression, so smaller in what is committed.
    plain = scene(19, 13) if width < 100 else image
    files = [jpegs(image, grey), four_colours(image), pngs(image, grey), others(image, grey), small()]
    for files in [*files, bmps(plain), tiffs(plain), pnms(plain), mpos(plain)]:
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
    names = ["420.jpg", "444.jpg", "restart.jpg", "grey.jpg", "cmyk.jpg", "progressive.jpg"]
    rows = [row for name in names for row in damaged(name, (folder / name).read_bytes())]
    text = ",\n".join(json.dumps(row) for row in rows)
    (folder / "damaged.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), 211, 148)
    else:
        main(Path(__file__).parent, 83, 59)
