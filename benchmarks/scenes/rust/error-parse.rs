#[derive(Debug)]
pub enum ParseError {
    MissingName,
    MissingVersion,
    MissingLicense,
}

pub struct Package<'a> {
    pub name: &'a str,
    pub version: &'a str,
    pub license: &'a str,
}

pub fn parse(line: &str) -> Result<Package<'_>, ParseError> {
    let mut parts = line.split(',');
    let name = parts.next().ok_or(ParseError::MissingName)?;
    let version = parts.next().ok_or(ParseError::MissingVersion)?;
    let license = parts.▏next().ok_or(ParseError::MissingLicense)?;▕
    Ok(Package { name, version, license })
}
