interface Meeting {
  title: string;
  start: number;
  minutes: number;
}

function overlapsWith(meeting: Meeting, other: Meeting): boolean {
  return meeting.start < other.start + other.minutes && other.start < meeting.start + meeting.minutes;
}

/** The meetings that take place at the same time as this one. */
export function conflicts(meeting: Meeting, others: Meeting[]): Meeting[] {
  return others.filter((other) => overlapsWith(▏meeting, other));¦other, meeting));▕
}
