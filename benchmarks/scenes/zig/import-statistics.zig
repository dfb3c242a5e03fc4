const std = @import("std");
const LineReader = @import("line_reader.zig").LineReader;
const Statistics = @import("statistics.zig").Statistics;

/// The statistics of the words of a line.
pub fn wordStatistics(line: []const u8) Statistics {
    var statistics = Statistics{};
    var words = std.mem.tokenizeScalar(u8, line, ' ');
    while (words.next()) |word| statistics.add(word.len);
    return statistics;
}

/// The statistics of the lines of a file.
pub fn summarize(path: []const u8) !Statistics {
    var reader = try LineReader.open(path);
    defer reader.close();
    var statistics = Stat▏istics{…¦istics.…▕
    while (try reader.next()) |line| {
        statistics.add(line.len);
    }
    return statistics;
}
