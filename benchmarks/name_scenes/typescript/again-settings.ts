interface Settings {
  theme: string;
  fontSize: number;
  lineHeight: number;
}

export function readSettings(storage: Storage): Settings {
  const theme = storage.getItem("theme") ?? "light";
  const fontSize = Number(storage.getItem("fontSize") ?? 14);
  const ▏≠theme…¦≠fontSize…▕
  return { theme, fontSize, lineHeight };
}
