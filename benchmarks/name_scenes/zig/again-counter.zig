pub const Counter = struct {
    hits: u64 = 0,
    misses: u64 = 0,

    pub fn countHit(self: *Counter) void {
        self.hits += 1;
    }

    pub fn ▏≠countHit…¦≠reset…▕
        self.misses += 1;
    }

    pub fn reset(self: *Counter) void {
        self.* = .{};
    }
};
