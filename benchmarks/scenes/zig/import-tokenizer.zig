const std = @import("std");
const LineReader = @import("line_reader.zig").LineReader;
const Statistics = @import("statistics.zig").Statistics;

pub fn summarize(path: []const u8) !Statistics {
    var reader = try LineReader.open(path);
    defer reader.close();
    var statistics = Stat▏istics{};¦istics.init();¦istics…▕
    while (try reader.next()) |line| {
        statistics.add(line.len);
    }
    return statistics;
}
