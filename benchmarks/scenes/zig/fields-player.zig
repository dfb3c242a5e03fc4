pub const Player = struct {
    name: []const u8,
    health: u32,
    stamina: u32,
    position: [2]i32,

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
