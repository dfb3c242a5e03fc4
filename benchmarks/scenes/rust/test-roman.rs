pub fn roman(mut number: u32) -> String {
    let mut text = String::new();
    for (value, letters) in [(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")] {
        while number >= value {
            text.push_str(letters);
            number -= value;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_is_five_less_one() {
        assert_eq!(roman(4), "IV");
    }

    #[test]
    fn nine_is_ten_less_one() {
        ass▏ert_eq!(roman(…▕
    }
}
