pub trait Visitor {
    fn visit_number(&mut self, value: f64);
    fn visit_name(&mut self, name: &str);
    fn visit_sum(&mut self, left: &Expr, right: &Expr);
}

pub struct Printer {
    text: String,
}

impl Visitor for Printer {
    fn visit_number(&mut self, value: f64) {
        self.text.push_str(&value.to_string());
    }

    fn visit_name(&mut self, name: &str) {
        self.text.push_str(name);
    }

    fn ▏≠visit_number…¦≠visit_name…▕
        self.visit(left);
        self.text.push_str(" + ");
        self.visit(right);
    }
}
