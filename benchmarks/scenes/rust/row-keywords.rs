#[derive(Debug, PartialEq)]
pub enum Keyword {
    Let,
    While,
    Return,
    Import,
}

pub fn keyword(word: &str) -> Option<Keyword> {
    match word {
        "let" => Some(Keyword::Let),
        "while" => Some(Keyword::While),
        "return" => Some(Keyword::Return),
        "import" => ▏Some(Keyword::Import),▕
        _ => None,
    }
}
