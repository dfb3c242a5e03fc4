use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

/// The first line of a file.
pub fn first_line(path: &Path) -> io::Result<String> {
    let reader = BufReader::new(File::open(path)?);
    reader.lines().next().unwrap_or(Ok(String::new()))
}

/// The number of lines of a file that are not blank.
pub fn count_lines(path: &Path) -> io::Result<usize> {
    let reader = Buf▏Reader::new(…▕
    let mut count = 0;
    for line in reader.lines() {
        if !line?.trim().is_empty() {
            count += 1;
        }
    }
    Ok(count)
}
