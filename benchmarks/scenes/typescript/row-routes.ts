import { HomePage, OrdersPage, InvoicesPage, CustomersPage } from "./pages";

/** The pages under their paths; the first is shown at the start. */
export const routes = [
  { path: "/home", component: HomePage },
  { path: "/orders", component: OrdersPage },
  { path: "/invoices", component: InvoicesPage },
  { path: "/customers", component: ▏CustomersPage },▕
];

export const start = routes[0].path;
