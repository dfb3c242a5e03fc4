use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

/// The number of lines of a file that are not blank.
pub fn count_lines(path: &Path) -> io::Result<usize> {
    let reader = Buf▏Reader::new(File::open(path)?);¦Reader::new(…▕
    let mut count = 0;
    for line in reader.lines() {
        if !line?.trim().is_empty() {
            count += 1;
        }
    }
    Ok(count)
}
