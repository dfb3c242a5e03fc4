pub struct Image {
    pub width: usize,
    pub height: usize,
    pub pixels: Vec<u8>,
}

/// The part of an image that begins at a corner and has this size.
pub fn crop(image: &Image, left: usize, top: usize, size: usize) -> Image {
    let mut pixels = Vec::new();
    for row in top..top + size {
        let start = row * image.width + left;
        pixels.extend_from_slice(&image.pixels[start..start + size]);
    }
    Image { width: size, height: size, pixels }
}

/// The same with its edges halved.
pub fn crop_half(image: &Image, left: usize, top: usize, size: usize) -> Image {
    crop(im▏age, left, top, size / 2▕)
}
