const std = @import("std");

pub const HeaderError = error{ TooShort, WrongMagic, WrongVersion };

const magic = "GRID";
const version: u8 = 3;

/// Checks the first bytes of a file.
pub fn checkHeader(bytes: []const u8) HeaderError!void {
    if (bytes.len < 5) return error.TooShort;
    if (!std.mem.eql(u8, bytes[0..4], magic)) return error.WrongMagic;
    if (bytes[4] != version) ret▏urn error.…▕
}
