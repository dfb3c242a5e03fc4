/// A grid of cells, row by row.
pub struct Grid {
    cells: Vec<u8>,
    columns: usize,
}

impl Grid {
    /// Returns the cell in this row and column.
    ///
    /// # Panics
    ///
    /// Panics if the row or the column is outside of the grid.
    pub fn get(&self, row: usize, column: usize) -> u8 {
        self.cells[row * self.columns + column]
    }

    /// Sets the cell in this row and column.
    ///
    /// # Panics
    ///
    /// Pan▏ics if the row or the column is outside of the grid.▕
    pub fn set(&mut self, row: usize, column: usize, value: u8) {
        self.cells[row * self.columns + column] = value;
    }
}
