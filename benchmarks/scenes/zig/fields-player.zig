pub const Player = struct {
    name: []const u8,
    health: u32,
    stamina: u32,
    position: [2]i32,

    /// A player who has to begin again at the start.
    pub fn reset(name: []const u8) Player {
        return .{
            .name = name,
            .health = 100,
            .stamina = 100,
            .position = .{ 0, 0 },
        };
    }

    /// A player with full bars at a place.
    pub fn init(name: []const u8, position: [2]i32) Player {
        return .{
            .name = name,
            .health = 100,
            .stam▏ina = 100,▕
            .position = position,
        };
    }
};
