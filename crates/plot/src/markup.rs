//! Escaping of text in SVG and HTML.

/// Escapes text for an element or a quoted attribute of SVG or HTML. Control characters, which neither may contain,
/// become U+FFFD, except for line breaks and tabs.
///
/// ```
/// use brigade_plot::escape_markup;
/// assert_eq!(escape_markup("a < \"b\"\u{7}"), "a &lt; &quot;b&quot;\u{fffd}");
/// ```
#[must_use]
pub fn escape_markup(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' | '\t' => escaped.push(letter),
            _ if letter.is_control() => escaped.push('\u{fffd}'),
            _ => escaped.push(letter),
        }
    }
    escaped
}
