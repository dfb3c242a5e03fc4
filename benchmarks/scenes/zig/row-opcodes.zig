pub const Opcode = enum { push, pop, add, jump };

pub fn opcodeName(opcode: Opcode) []const u8 {
    return switch (opcode) {
        .push => "push",
        .pop => "pop",
        .add => "add",
        .jump => "▏jump▕",
    };
}
