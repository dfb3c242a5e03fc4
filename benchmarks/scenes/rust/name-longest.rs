use std::collections::HashMap;

/// The word that occurs most often, and how often.
pub fn most_frequent(title: &str, text: &str) -> Option<(String, usize)> {
    let mut occurrences: HashMap<String, usize> = HashMap::new();
    for word in title.split_whitespace() {
        *occurrences.entry(word.to_string()).or_insert(0) += 1;
    }
    for word in text.split_whitespace() {
        *occ▏urrences.entry(…▕
    }
    occurrences.into_iter().max_by_key(|(_, count)| *count)
}
