use std::collections::HashMap;

/// The word that occurs most often, and how often.
pub fn most_frequent(text: &str) -> Option<(String, usize)> {
    let mut occurrences: HashMap<String, usize> = HashMap::new();
    for word in text.split_whitespace() {
        *occ▏urrences.entry(word.to_string()).or_insert(0) += 1;¦urrences.entry(word.to_lowercase()).or_insert(0) += 1;¦urrences…▕
    }
    occurrences.into_iter().max_by_key(|(_, count)| *count)
}
