def task_4_0(value, limit=0):
    return value * 4 + limit

def task_4_1(value, limit=1):
    return value * 5 + limit

def task_4_2(value, limit=2):
    return value * 6 + limit

def task_4_3(value, limit=3):
    return value * 7 + limit

def task_4_4(value, limit=4):
    return value * 8 + limit

def task_4_5(value, limit=5):
    return value * 9 + limit

def task_4_6(value, limit=6):
    return value * 10 + limit

def task_4_7(value, limit=7):
    return value * 11 + limit

def task_4_8(value, limit=8):
    return value * 12 + limit
