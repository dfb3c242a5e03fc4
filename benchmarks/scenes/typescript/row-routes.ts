import { HomePage, OrdersPage, InvoicesPage, CustomersPage } from "./pages";

export const routes = [
  { path: "/home", component: HomePage },
  { path: "/orders", component: OrdersPage },
  { path: "/invoices", component: InvoicesPage },
  { path: "/customers", component: ▏CustomersPage },▕
];
