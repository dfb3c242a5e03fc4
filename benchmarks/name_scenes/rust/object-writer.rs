use std::fs::File;
use std::io::{self, BufWriter, Write};

pub fn write_header(path: &str) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(b"name,amount\n")?;
    file.flush()?;
    Ok(())
}

pub fn write_rows(path: &str, rows: &[String]) -> io::Result<()> {
    let mut output = BufWriter::new(File::create(path)?);
    for row in rows {
        output.write_all(row.as_bytes())?;
        ▏output.write_all(b"\n")?;▕
    }
    output.flush()?;
    Ok(())
}
